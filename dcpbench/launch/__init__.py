"""Launch torchrun jobs, and manage their files, folders and progress."""
