"""From bytes to requests and back: the listening side, and what one connection may do."""
