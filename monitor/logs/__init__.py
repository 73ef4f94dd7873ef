"""What the text that training prints says: lines, who wrote them, tracebacks, progress."""
