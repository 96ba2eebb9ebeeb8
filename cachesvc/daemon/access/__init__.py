"""Who may use what: tenants, quotas, paths on the allowlist, TLS.

In: peers' credentials and URIs. Out: permission, or NotAllowed. It owns the rules and certificates.
"""
