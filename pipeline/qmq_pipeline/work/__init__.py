"""What an executor does with one part of the input."""
