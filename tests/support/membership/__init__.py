"""Real sources of members: files, dnsmasq and etcd, and a thread that watches one; nodes that give blocks of extents."""
