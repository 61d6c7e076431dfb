"""The same recipes in verl (0.9.1): quantized actor, rollout weights that are the actor's own, gap metrics.

    driver      config.py    `+mxrl.recipe=…` is checked before Ray starts, and sent to every process of the run
    every one   plugin.py    registers what follows; loaded by the entry point `verl.plugins`
    actor       engine.py    FSDP and FSDP2: convert before wrapping; export.py: Q(w + noise) of what verl streams
    rollout     rollout.py   Hugging Face rollout for a CPU and for checking
                vllm.py      vLLM takes exported weights as they are; its inputs by integrations/vllm, checked here
    trainer     metrics.py   our gap metrics beside verl's own
    tests       cpu.py       a platform without an accelerator

Importing this package imports nothing of verl; its modules are the only ones that do.
"""
