"""The only places that import a training framework: `trl` (GRPO), `verl`."""
