"""Sending inside the application's transaction: the choice of the session, the INSERT, and the
notes for the publisher.
"""
