"""Whether a kernel's answer is right."""
