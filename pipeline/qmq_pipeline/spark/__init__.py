"""The session, the Java under it, and its errors in our words."""
