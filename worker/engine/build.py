"""Makes the engine that a rank's configuration names. Imports torch only for the torch engine."""

from radixmesh.errors import InvalidRequest
from worker.config import RankConfig
from worker.engine.engine import Engine
from worker.engine.overlapped import Overlapped


def build_engine(config: RankConfig) -> Engine:
    """Load the engine, with a thread of its own where steps overlap; may take minutes.

    Raises:
        InvalidRequest: There is no engine of that name, its libraries are not installed,
            or the configuration is wrong.
        NotSupported: The engine does not do what the configuration asks for.
    """
    engine = _build(config)
    return Overlapped(engine) if config.overlap and config.pp == 1 else engine


def _build(config: RankConfig) -> Engine:
    if config.engine == "fake":
        from worker.engine.fake import FakeEngine

        return FakeEngine.load(config)
    if config.engine == "torch":
        try:
            from worker.engine.torch_engine import TorchEngine
        except ModuleNotFoundError as error:
            raise InvalidRequest(
                f"--engine torch needs {error.name}; run: pip install 'radixmesh[worker]'"
            ) from error
        return TorchEngine.load(config)
    raise InvalidRequest(f"--engine: expected torch or fake, got {config.engine!r}", field="engine")
