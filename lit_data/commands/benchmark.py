"""``benchmark``: how fast samples are loaded, beside the usual ways to load them, and how fast training could be."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from omegaconf import DictConfig

from lit_data.commands.benchmarks.claims import run_claims
from lit_data.commands.benchmarks.compare import run_collate, run_loaders
from lit_data.commands.benchmarks.ct import run_ct
from lit_data.commands.benchmarks.gan import run_gan
from lit_data.commands.benchmarks.gpu import run_gpu
from lit_data.commands.benchmarks.headroom import run_headroom
from lit_data.commands.benchmarks.mosaic import run_mosaic
from lit_data.commands.benchmarks.options import BenchmarkOptions, read_options
from lit_data.commands.benchmarks.overhead import run_overhead
from lit_data.commands.benchmarks.predict import run_predict
from lit_data.commands.benchmarks.synthesis import run_synthesis
from lit_data.commands.diagnosis.machine import describe_machine, print_machine

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Measure what `benchmark.mode` says.

    `loaders` and `collate` print a table and write it as ``benchmark.csv`` and ``benchmark.png``. Every row is measured
    several times, in turn with the others, and the table holds medians:

    - ``samples_per_s``: after start and warm-up, until batches are finished on the device
    - ``ratio_to_dataloader``: to torch's DataLoader with as many workers
    - ``process_cpu_ms_per_1000``: processor time of the main process, all its threads, for 1000 samples
    - ``main_thread_cpu_ms_per_1000``: the same of its main thread alone
    - ``first_batch_ms``: from asking for an iterator, which starts workers, to the first finished batch
    - ``load_ms_mean``, ``load_ms_std``: from asking for a batch to having it finished
    - ``transfer_ms``: copy of a batch from host to device; 0 where that is the CPU
    - ``pss_mib``: memory of the main process and its workers, shared pages counted once
    - ``samples``, ``repeats``, ``note``: what was measured, or why it was not

    `synthesis` writes the same files with a row for each family of defects; the table holds medians of these, on one
    core, as workers draw:

    - ``original_us``: time of a defect, computed over every pixel of the whole first image, one after the other
    - ``local_us``: in its own window, one after the other; most of it is what calls of torch cost
    - ``batched_us``: in a batch, as lit_data does it
    - ``device_us``: the same on a CUDA device, left out elsewhere
    - ``original_numpy_us``, ``local_numpy_us``: spots as NumPy draws them
    - ``ratio_to_original``, ``ratio_to_local``: how often ``batched_us`` goes into those, or into NumPy's where that is
      faster

    `mosaic` writes the same files with a row for each way to make a batch of mosaics of four, all in memory and on one
    core: ``original`` as people do it, with colours and a flip; ``original_files`` with decoding; ``worker``, drawn by
    workers, and ``worker_finished``, with what else the model needs, a micro-batch at a time; ``device``, what is left
    for the core where the device draws. The table holds medians:

    - ``us``: time of an image
    - ``images_per_s``: of a core
    - ``ratio_to_original``: how often ``us`` goes into that of ``original``

    `ct` writes a table with a row for each way to the occupied voxels of a volume, in turn, as points and values:
    ``argwhere`` and ``nonzero`` read the dense file and search it, ``memory_map`` searches it slab by slab as lit_data
    does, ``sparse_file`` reads compressed archives, ``store`` maps the index, ``subset`` draws some points of it,
    ``cached`` takes it from memory. All but ``subset`` give equal samples, which is checked:

    - ``prepare_ms``: making of files or store, for a volume
    - ``first_epoch_ms``, ``load_ms_mean``, ``load_ms_std``: of a sample in the first and in all later epochs
    - ``ratio_to_argwhere``: mean time of ``argwhere`` by that of the row
    - ``memory_mib``: most memory that a sample allocates; pages of memory maps belong to the page cache
    - ``points``, ``samples``: occupied voxels found in an epoch, samples in later epochs

    `predict` writes a table with a row for each way to predict images of mixed sizes, from file to array: ``original``
    one at a time in float32, ``batched`` tiles of all images in batches, ``channels_last`` in the format that
    convolutions want, ``bf16`` in bfloat16 too; with ``benchmark.compile`` ``compiled``, ``compiled_bf16``, and with
    int8 convolutions ``static``, ``static_bf16``, for which images are filled up to whole tiles:

    - ``images_per_s``: median; ``ratio_to_original``: by that of ``original``
    - ``dice_to_fp32``, ``mean_difference``, ``max_difference``: of masks and probabilities to those of ``original``
    - ``peak_mib``: most memory of tensors while a batch is predicted, for what is not compiled
    - ``note``: why a way was not measured

    `gan` writes a table with a row for each way to make a step of a GAN: ``original`` as it is often written, with
    fakes made twice, their graph kept, all losses in one backward; ``careful`` with fakes without a graph; ``whole``
    as `GANModule` makes it, ``checkpointed`` with activations of blocks computed twice, ``parts`` in parts of
    `micro_batch_sizes`. All steps have the same draws:

    - ``peak_mib``: most memory of tensors in a step with a penalty, weights, optimizers and batch among them: of
      tensors that operations return on a CPU, ``max_memory_allocated`` on a GPU
    - ``largest_batch``: the largest batch whose peak is not above that of ``original`` at its batch; 8 times that at
      most
    - ``step_ms``: mean over `steps`, with the penalties among them; median of `repeats`
    - ``gradient_difference``: norm of the difference of both nets' gradients to those of ``original``, by their norm
    - ``peak_to_original``, ``largest_to_original``, ``time_to_original``: by that of ``original``

    `gpu` writes and prints a table of what a first GPU is asked: copies to it, drawing and augmenting with pixels of
    the batch and of the device, training with its share of waiting in three precisions, a batch that does not fit,
    peaks of a GAN's step, prediction beside the host's. What fails is a row too, and the rest is asked all the same.

    `claims` writes a table with a row for each figure that circulates for this kind of tuning; less is better in all:

    - ``circulates``: as people tell it
    - ``usual``, ``ours``, ``unit``: what came out here
    - ``saved_fraction``, ``ratio``: 1 - ours / usual, and usual / ours

    Returns:
        Keys ``benchmark/NAME``:

        - ``cores``, ``cpu``, ``memory_bytes``, ``device``, ``python``, ``torch``, ``numpy``, ``lightning``: where
        - ``batch_size``: that of all figures below
        - mode `loaders` with ``finish=both``: the keys of the second table, on the host, begin with ``host_``
        - modes `loaders` and `collate`: the columns above under ``METHOD_COLUMN``, of each method's fastest row;
          ``best_method`` and ``best_samples_per_s`` of the methods of lit_data; ``ratio_to_original``,
          ``ratio_to_improved``, ``ratio_to_dataloader``, ``ratio_to_textbook`` and ``share_of_copy`` of that best one
          to the fastest row of the other
        - mode `loaders`: ``recommended_worker_kind``, ``recommended_num_workers``, ``recommended_micro_batch_size``
        - mode `headroom`: ``fit_samples_per_s`` of training as it is, ``headroom_samples_per_s`` of training on batches
          that are replayed from the device's memory, ``fit_share_of_headroom``
        - mode `callbacks`: ``step_us``, the median step of a small net without callbacks; for each callback of lit_data
          in the configuration and for ``all``: ``NAME_us`` on top of it, ``NAME_share_of_5_ms`` as a share of 5 ms
        - mode `synthesis`: its columns above under ``FAMILY_COLUMN``, of each family and of ``all`` together;
          ``ratio_to_original`` and ``ratio_to_local`` of the latter; ``finish_ms``, a planned batch with all families
          until it is drawn and augmented on the device, or on one core of the CPU; with ``benchmark.compile``
          ``finish_compiled_ms``, the same with compiled augmentation, or ``finish_compiled_note``, why it could not be
          compiled
        - mode `ct`: its columns above under ``WAY_COLUMN``, ``volumes``, and ``points`` of all of them
        - mode `predict`: its columns above under ``WAY_COLUMN``, each way at its fastest batch size; ``best_way``,
          ``batch_size`` and ``ratio_to_original`` of the fastest; ``images``
        - mode `gan`: its columns above under ``WAY_COLUMN``; ``part_size``
        - mode `gpu`: ``PART_WHAT`` for each row with a number, and ``failed``, how many parts did
        - mode `claims`: ``CLAIM_usual``, ``CLAIM_ours``, ``CLAIM_saved_fraction``, ``CLAIM_ratio``
        - mode `mosaic`: its columns above under ``WAY_COLUMN``; with ``benchmark.train`` ``finish_ms``, a planned batch
          until its mosaics are drawn and augmented on the device, ``train_samples_per_s``, ``train_step_ms`` and
          ``train_wait_fraction``, the share of a step that waits for data

    Raises:
        ConfigError: An option is out of its range, or the mode does not fit the data.
    """
    options = read_options(cfg.benchmark)
    machine = describe_machine(options.choose_device())
    log.info("%s", print_machine(machine))
    metrics = _MODES[options.mode](cfg, options)
    return {f"benchmark/{name}": value for name, value in machine.items()} | metrics


_MODES: Final[Mapping[str, Callable[[DictConfig, BenchmarkOptions], dict[str, Any]]]] = {
    "loaders": run_loaders,
    "collate": run_collate,
    "headroom": run_headroom,
    "callbacks": run_overhead,
    "synthesis": run_synthesis,
    "mosaic": run_mosaic,
    "ct": run_ct,
    "predict": run_predict,
    "gan": run_gan,
    "gpu": run_gpu,
    "claims": run_claims,
}
