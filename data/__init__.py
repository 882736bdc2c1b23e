"""What both scripts use around the lesson: the text and where it comes from, flags and errors, files."""
