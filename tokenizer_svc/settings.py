"""The flags of both services. Knows names, defaults and bounds; reads nothing itself."""

from typing import Literal

from pydantic import Field

from radixmesh.settings import ServiceSettings, SettingsConfigDict


class TokenizerSettings(ServiceSettings):
    """Turns text and conversations into token ids."""

    model_config = SettingsConfigDict(env_prefix="RADIXMESH_TOKENIZER_")

    model: str
    """Hugging Face directory of the model, or the name of the default model."""

    model_name: str = ""
    """Name under which the model is served; the last part of --model when empty."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=30010, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the metrics page; 0 serves none."""

    max_prompt_bytes: int = Field(default=2 * 1024 * 1024, ge=1, le=3 * 1024 * 1024)
    """Longer prompts are refused before any work is done."""

    max_waiting: int = Field(default=4096, ge=1)
    """Prompts that may wait to be encoded; more are refused."""

    max_waiting_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Bytes of prompts that may wait to be encoded; more are refused."""

    max_batch: int = Field(default=64, ge=1)
    """Prompts that are encoded together."""

    threads: int = Field(default=2, ge=1, le=64)
    """Batches that are encoded at the same time."""

    drain_s: float = Field(default=2.0, ge=0)
    """Seconds to finish waiting prompts in when told to stop."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""

    log_json: bool = False
    """Log one JSON object a line."""


class DetokenizerSettings(ServiceSettings):
    """Turns streams of token ids into text and finds stop strings."""

    model_config = SettingsConfigDict(env_prefix="RADIXMESH_DETOKENIZER_")

    model: str
    """Hugging Face directory of the model, or the name of the default model."""

    model_name: str = ""
    """Name under which the model is served; the last part of --model when empty."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=30020, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the metrics page; 0 serves none."""

    max_outputs: int = Field(default=65536, ge=1)
    """Outputs that may be open on one link; more are refused."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""

    log_json: bool = False
    """Log one JSON object a line."""
