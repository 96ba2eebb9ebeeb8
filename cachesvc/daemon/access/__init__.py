"""Access control: tenants, quotas, caps of users, paths on the allowlist, TLS.

In: peers' credentials and URIs. Out: permission, or NotAllowed. It owns the rules and certificates.
"""
