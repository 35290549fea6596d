"""What a rank process is told at its start. The front writes it, ranks and engines read it.

Plain data that travels as one JSON argument. Knows no flags (the front's
`settings.py` does) and opens nothing.
"""

import msgspec


class FakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the fake engine pretends.

    Attributes:
        eos_after: An end id follows this many output ids; 0 means never.
        prefill_tokens_per_s: Pace of prefill; 0 means at once.
        decode_ms: Time of a step that decodes; 0 means none.
        kv_blocks: Blocks of its KV cache; 0 means by `kv_tokens`, else 4096.
        faults: Scripted faults, such as `exit@step=20`; see `engine/faults.py`.
    """

    eos_after: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_ms: float = 0.0
    kv_blocks: int = 0
    faults: tuple[str, ...] = ()


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank process needs.

    Attributes:
        model_dir: A Hugging Face directory.
        engine: `torch` or `fake`.
        dp: Replicas of the group; pp: stages of each; tp: ranks of each stage.
        dp_rank: Which replica this rank belongs to.
        pp_rank: In which stage of it; tp_rank: where in that.
        block_tokens: Ids per KV block; 0 means what the engine wants.
        kv_tokens: Ids that the KV cache holds; 0 means by `kv_bytes`.
        kv_bytes: Bytes for the KV cache of this rank.
        max_model_len: Prompt and output ids of one request; 0 means the model's.
        max_running: Requests in one step.
        max_waiting: Requests queued beyond those before QUEUE_FULL.
        max_batched_tokens: Ids computed in one step.
        threads: CPU threads of this rank; 0 means what the library takes.
        device: Which accelerator of this host, modulo their number; unused on the CPU.
        dtype: `auto`, or torch's name of one.
        fake: For the engine `fake` only.
        order: `lpm` (the longest cached prefix goes first) or `fcfs`.
        ageing_ms: A request that has waited so long goes before any that has not.
        overlap: Whether a step is planned while the one before it is computed; of no
            effect where there are several stages.
        step_timeout_s: A step that takes longer is stuck: the rank dumps its stack and exits.
        peer_timeout_s: A rank that another one waits for has so long, unless it computes.
        carrier: `local` or `gloo`: how records travel.
        tensors: `shm` or `gloo`: how the tensors of a stage's tp ranks travel.
        mailbox_fd: Inherited socket to the front; -1 on every rank but (0, 0).
        broadcast_fds: Inherited sockets of the `local` broadcast. Rank (0, 0): one per
            other rank, by rank number; others: the one to rank (0, 0).
        tensor_fd: Inherited memory that the tp ranks of a stage share; -1 where `tensors`
            is not `shm`.
        spin: Whether a rank may spin for microseconds before it sleeps: there are as many
            cores as ranks.
        host: Address of this rank's host, for gloo.
        store_host: Where the ranks of this replica meet, for gloo; store_port: likewise.
        store_fd: Inherited listening socket of that place; -1 on every rank but (0, 0).
        log_level: Of the standard library's logging.
    """

    model_dir: str
    engine: str = "torch"
    dp: int = 1
    pp: int = 1
    tp: int = 1
    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0
    block_tokens: int = 0
    kv_tokens: int = 0
    kv_bytes: int = 1 << 30
    max_model_len: int = 0
    max_running: int = 64
    max_waiting: int = 1024
    max_batched_tokens: int = 512
    threads: int = 0
    device: int = 0
    dtype: str = "auto"
    fake: FakeConfig = FakeConfig()
    order: str = "lpm"
    ageing_ms: int = 1000
    overlap: bool = False
    step_timeout_s: float = 60.0
    peer_timeout_s: float = 4.0
    carrier: str = "local"
    tensors: str = "shm"
    mailbox_fd: int = -1
    broadcast_fds: tuple[int, ...] = ()
    tensor_fd: int = -1
    spin: bool = False
    host: str = "127.0.0.1"
    store_host: str = "127.0.0.1"
    store_port: int = 0
    store_fd: int = -1
    log_level: str = "INFO"

    @property
    def depth(self) -> int:
        """Steps that may be under way at once: one per stage, or two that overlap."""
        return self.pp if self.pp > 1 else 1 + self.overlap
