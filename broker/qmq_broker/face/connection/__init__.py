"""Connections: the listening socket, and the HTTP protocol of one connection."""
