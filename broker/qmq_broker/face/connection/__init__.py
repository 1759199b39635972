"""Connections: the listening side, and one connection from bytes to requests and back."""
