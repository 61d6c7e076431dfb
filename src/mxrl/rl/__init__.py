"""Reinforcement learning on quantized policies: tasks and rewards, policies, rollouts, gap metrics, training."""
