"""What engines say of prompts, held against what was predicted: who is mispredicted, and why."""
