"""The command line: `stratagate serve` and what it accepts. Heavy modules load only when a command runs."""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from gateway.config import (
    DTYPES,
    KV_TYPES,
    LOG_FORMATS,
    LOG_LEVELS,
    MAX_CACHE_MIB,
    MAX_CONTEXT,
    MAX_CONVERSATIONS,
    MAX_DRAIN_S,
    MAX_EXPERTS,
    MAX_PREFILL,
    MAX_QUEUE,
    PLE_IO,
    RESUMES,
    ServeOptions,
    address,
    choice,
    count,
    count_or_auto,
    device,
    host_name,
    http_url,
    load_config,
    model_name,
    number,
    origin,
    path,
    path_text,
)
from gateway.errors import ConfigError
from gateway.model_commands import add_model_commands
from scheduler.command_line import exit_status
from scheduler.config import KERNELS, CacheConfig
from scheduler.messages import MAX_SLOTS, MAX_SPEC

if TYPE_CHECKING:
    from collections.abc import Callable

_Value = TypeVar("_Value")
_HELP = "Serve hybrid GDN, sparse attention and MoE models with MTP drafts over OpenAI's protocol."
_DEFAULTS = ServeOptions()


class _PlainErrors(TyperGroup):
    """Ends as the commands on models do."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        sys.exit(exit_status(partial(super().main, *args, standalone_mode=False, **extra)))


app = typer.Typer(
    name="stratagate",
    cls=_PlainErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> str:
    """The installed version."""
    try:
        return installed_version("stratagate")
    except PackageNotFoundError:
        return "0+unknown"


def _option(
    name: str, text: str, parse: Callable[[str], object] | None = None, metavar: str | None = None
) -> Any:
    """One option of `serve`, also read from STRATAGATE_NAME."""
    return typer.Option(
        name,
        help=text,
        metavar=metavar,
        parser=None if parse is None else partial(_parse, parse),
        envvar=f"STRATAGATE_{name.strip('-').upper().replace('-', '_')}",
    )


def _parse(parse: Callable[[str], _Value], value: str) -> _Value:
    # Defaults come through here as well, already parsed.
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return value
    try:
        return parse(value)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stratagate {version()}")
        raise typer.Exit


@app.callback(help=_HELP)
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command."""


@app.command(help="Serve a model: http://127.0.0.1:8080/v1, and a page at /.")
def serve(
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        _option(
            "--model", "Checkpoint directory, or `default` for the shipped model.", metavar="DIR"
        ),
    ] = None,
    native: Annotated[
        str | None,
        _option(
            "--native",
            "GGUF file to serve, of several shards any; with --pack the one that the pack leaves tensors in.",
            path_text,
            "FILE",
        ),
    ] = None,
    pack: Annotated[
        str | None,
        _option("--pack", "Pack to serve, as `stratagate pack` writes it.", path_text, "DIR"),
    ] = None,
    served_model_name: Annotated[
        str | None,
        _option(
            "--served-model-name", "Name of the model in requests and answers.", model_name, "NAME"
        ),
    ] = None,
    host: Annotated[
        str, _option("--host", "Address to listen on.", address, "ADDRESS")
    ] = _DEFAULTS.host,
    port: Annotated[
        int, _option("--port", "0 takes a free one.", count(0, 65535), "N")
    ] = _DEFAULTS.port,
    api_key_file: Annotated[
        Path | None,
        _option(
            "--api-key-file",
            "Keys that clients must send: one a line, `name:key` or `key`, then rpm=N tpm=N concurrent=N.",
            path,
            "FILE",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _option(
            "--cors-origin",
            "Origin whose pages may call the API; may be repeated.",
            origin,
            "ORIGIN",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "--allowed-host",
            "Host name the server answers to besides addresses and localhost; may be repeated.",
            host_name,
            "NAME",
        ),
    ] = None,
    device_name: Annotated[
        str, _option("--device", "auto, cpu, cuda or cuda:N.", device, "NAME")
    ] = _DEFAULTS.device,
    dtype: Annotated[
        str, _option("--dtype", "auto, float32 or bfloat16.", choice(DTYPES), "NAME")
    ] = _DEFAULTS.dtype,
    kv: Annotated[
        str,
        _option(
            "--kv",
            "What keys and values are held in: auto (as --dtype), fp32, bf16 or int8.",
            choice(KV_TYPES),
            "NAME",
        ),
    ] = _DEFAULTS.kv,
    kernels: Annotated[
        str,
        _option(
            "--kernels",
            "auto, compiled (C on a CPU, Triton kernels on a GPU), portable (C without AMX) or torch.",
            choice(KERNELS),
            "NAME",
        ),
    ] = _DEFAULTS.kernels,
    threads: Annotated[
        int | None,
        _option("--threads", "CPU threads of the layers.", count(1, 1024), "N"),
    ] = None,
    batch: Annotated[
        int, _option("--batch", "Batch slots.", count(1, MAX_SLOTS), "N")
    ] = _DEFAULTS.batch,
    max_context: Annotated[
        int | None,
        _option(
            "--max-context",
            "Tokens a slot holds, prompt and output; left out: what the model was made for.",
            count(16, MAX_CONTEXT),
            "N",
        ),
    ] = None,
    spec: Annotated[
        int | None,
        _option(
            "--spec",
            f"Longest draft chain; left out: {MAX_SPEC}.",
            count(0, MAX_SPEC),
            "N",
        ),
    ] = None,
    spec_min_p: Annotated[
        float,
        _option(
            "--spec-min-p",
            "A chain ends before the first draft less probable than this.",
            number(0, 1),
            "P",
        ),
    ] = _DEFAULTS.spec_min_p,
    no_mtp: Annotated[
        bool, typer.Option("--no-mtp", help="Serve without the draft layer: a plain baseline.")
    ] = False,
    expert_cache: Annotated[
        int | None,
        _option(
            "--expert-cache",
            "Experts with a slot on the device; auto, the default, takes what is free and leaves no tiers if all fit.",
            count_or_auto(0, MAX_EXPERTS),
            "auto|N",
        ),
    ] = None,
    expert_profile: Annotated[
        Path | None,
        _option(
            "--expert-profile",
            "Ranking of the experts, as `stratagate profile` writes it.",
            path,
            "FILE",
        ),
    ] = None,
    pool_workers: Annotated[
        int | None,
        _option(
            "--pool-workers",
            "Threads that compute experts in host memory; 0: the GPU's kernels read those over the bus; "
            "left out: physical cores but one.",
            count(0, 1024),
            "N",
        ),
    ] = None,
    vram_reserve_mib: Annotated[
        int | None,
        _option(
            "--vram-reserve-mib",
            "Device memory to leave free; left out: 700, less where no working expert cache would fit.",
            count(0, MAX_CACHE_MIB),
            "MIB",
        ),
    ] = None,
    ple_io: Annotated[
        str,
        _option(
            "--ple-io",
            "Where the n-gram table is read from: ram, mmap or direct.",
            choice(PLE_IO),
            "NAME",
        ),
    ] = _DEFAULTS.ple_io,
    ple_gguf: Annotated[
        str | None,
        _option(
            "--ple-gguf",
            "GGUF file to take the n-gram table from, not the model's.",
            path_text,
            "FILE",
        ),
    ] = None,
    kv_resident: Annotated[
        int,
        _option(
            "--kv-resident", "K/V cells kept on the device; 0: all.", count(0, MAX_CONTEXT), "N"
        ),
    ] = _DEFAULTS.kv_resident,
    mtp: Annotated[
        str | None,
        _option(
            "--mtp",
            "Directory to take the draft layer from, not the model's: a pack, its mtp/, or a checkpoint.",
            path_text,
            "DIR",
        ),
    ] = None,
    batch_mtp: Annotated[
        bool, typer.Option("--batch-mtp", help="Draft for every slot of the batch: always on.")
    ] = True,
    batch_groups: Annotated[
        int,
        _option(
            "--batch-groups",
            "Groups of slots, and GPUs that share the layers.",
            count(1, MAX_SLOTS),
            "N",
        ),
    ] = _DEFAULTS.batch_groups,
    vision: Annotated[
        bool, typer.Option("--vision", help="Take images; not in this build.")
    ] = False,
    prefill: Annotated[
        int | None,
        _option(
            "--prefill",
            "Prompt tokens read at a time; auto, the default, chooses by device.",
            count_or_auto(1, MAX_PREFILL),
            "auto|N",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        _option(
            "--max-queue",
            "Requests that may wait; more get 429.",
            count(0, MAX_QUEUE),
            "N",
        ),
    ] = _DEFAULTS.max_queue,
    conversation_cache_slots: Annotated[
        int,
        _option(
            "--conversation-cache-slots",
            "Conversations that are kept without a batch slot; 0 keeps none.",
            count(0, MAX_CONVERSATIONS),
            "N",
        ),
    ] = _DEFAULTS.conversation_cache_slots,
    conversation_cache_mib: Annotated[
        int,
        _option(
            "--conversation-cache-mib",
            "Host memory that they may take; 0 keeps none.",
            count(0, MAX_CACHE_MIB),
            "MIB",
        ),
    ] = _DEFAULTS.conversation_cache_mib,
    conversation_cache_min_free_mib: Annotated[
        int,
        _option(
            "--conversation-cache-min-free-mib",
            "Nothing more is kept while the host has less free memory than this.",
            count(0, MAX_CACHE_MIB),
            "MIB",
        ),
    ] = _DEFAULTS.conversation_cache_min_free_mib,
    conversation_cache_dir: Annotated[
        Path | None,
        _option(
            "--conversation-cache-dir",
            "Directory in which conversations outlive the server; left out: memory alone.",
            path,
            "DIR",
        ),
    ] = None,
    conversation_cache_disk_mib: Annotated[
        int | None,
        _option(
            "--conversation-cache-disk-mib",
            f"Most that their files may take; left out: {CacheConfig().disk_bytes >> 20}.",
            count(1, MAX_CACHE_MIB),
            "MIB",
        ),
    ] = None,
    resume: Annotated[
        str,
        _option(
            "--resume",
            "exact reads the last answer again, fast goes on from its decoding (texts may differ in near-ties), "
            "auto does where that changes nothing.",
            choice(tuple(RESUMES)),
            "NAME",
        ),
    ] = _DEFAULTS.resume,
    drain_s: Annotated[
        float,
        _option(
            "--drain-s",
            "Seconds that running requests may take to finish when the server is stopped.",
            number(0, MAX_DRAIN_S),
            "S",
        ),
    ] = _DEFAULTS.drain_s,
    log_level: Annotated[
        str,
        _option(
            "--log-level",
            "debug, info, warning or error.",
            choice(LOG_LEVELS),
            "NAME",
        ),
    ] = _DEFAULTS.log_level,
    log_format: Annotated[
        str, _option("--log-format", "text or json.", choice(LOG_FORMATS), "NAME")
    ] = _DEFAULTS.log_format,
    otlp_endpoint: Annotated[
        str | None,
        _option(
            "--otlp-endpoint",
            "OpenTelemetry collector that gets traces over HTTP; needs the extra `otel`.",
            http_url,
            "URL",
        ),
    ] = None,
) -> None:
    """Checks the options, then hands over to the server."""
    del batch_mtp  # the only way there is
    if model is not None and model_argument is not None and model != model_argument:
        raise typer.BadParameter(f"the model is named twice: {model_argument} and --model {model}")
    try:
        config = load_config(
            ServeOptions(
                model=model_argument if model is None else model,
                native=native,
                pack=pack,
                served_model_name=served_model_name,
                host=host,
                port=port,
                api_key_file=api_key_file,
                cors_origins=tuple(cors_origin or ()),
                allowed_hosts=tuple(allowed_host or ()),
                device=device_name,
                dtype=dtype,
                kv=kv,
                kernels=kernels,
                threads=threads,
                batch=batch,
                max_context=max_context,
                spec=spec,
                spec_min_p=spec_min_p,
                no_mtp=no_mtp,
                prefill=prefill,
                expert_cache=expert_cache,
                expert_profile=expert_profile,
                pool_workers=pool_workers,
                vram_reserve_mib=vram_reserve_mib,
                ple_io=ple_io,
                ple_gguf=ple_gguf,
                kv_resident=kv_resident,
                mtp=mtp,
                batch_groups=batch_groups,
                vision=vision,
                max_queue=max_queue,
                conversation_cache_slots=conversation_cache_slots,
                conversation_cache_mib=conversation_cache_mib,
                conversation_cache_min_free_mib=conversation_cache_min_free_mib,
                conversation_cache_dir=conversation_cache_dir,
                conversation_cache_disk_mib=conversation_cache_disk_mib,
                resume=resume,
                drain_s=drain_s,
                log_level=log_level,
                log_format=log_format,
                otlp_endpoint=otlp_endpoint,
            )
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    from gateway.server import run_server

    raise typer.Exit(run_server(config, version()))


add_model_commands(app)
