"""Step, loss and speed out of the lines that trainers print."""

import math

import pytest

from ftdash.monitor.logs.hardware import gpu_fault
from ftdash.monitor.logs.progress import ProgressFollower, parse


def test_a_transformers_line_of_strings_is_read():
    found = parse("{'loss': '1.234', 'grad_norm': 'nan', 'learning_rate': '2e-05', 'epoch': '0.5'}")
    assert found is not None
    assert (found.loss, found.lr, found.epoch) == (1.234, 2e-5, 0.5)
    assert found.grad_norm is not None
    assert math.isnan(found.grad_norm)


def test_a_transformers_line_of_numbers_is_read_behind_a_bar():
    found = parse(" 12%|█▏  | 12/100 [00:10<01:20,  1.1it/s]{'loss': 0.0, 'grad_norm': nan, 'epoch': 1}")
    assert found is not None
    assert (found.loss, found.step, found.max_steps, found.source) == (0.0, 12, 100, "transformers")


def test_json_with_nan_and_infinity_is_read():
    found = parse('{"step": 7, "loss": NaN, "grad_norm": Infinity, "name": "x"}')
    assert found is not None
    assert found.step == 7
    assert found.loss is not None
    assert math.isnan(found.loss)
    assert found.grad_norm == math.inf


def test_an_axolotl_line_gives_its_tokens_per_second():
    found = parse(
        "{'loss': 1.1, 'grad_norm': 0.9, 'learning_rate': 1e-05, 'memory/max_active (GiB)': 17.2,"
        " 'tokens_per_second_per_gpu': 2140.5, 'epoch': 0.02}"
    )
    assert found is not None
    assert found.tokens_per_s == 2140.5


def test_deepspeed_lines_are_read():
    step = parse(
        "[2026-11-29 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0,"
        " lr=[1e-05, 1e-05], mom=[(0.9, 0.999)]"
    )
    speed = parse(
        "[Rank 0] epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=3.5,"
        " CurrSamplesPerSec=3.25, MemAllocated=2.2GB, MaxMemAllocated=5.1GB"
    )
    loss = parse("steps: 20 loss: 2.5431 iter time (s): 0.512 samples/sec: 15.6")
    assert step is not None
    assert (step.step, step.lr) == (10, 1e-5)
    assert speed is not None
    assert (speed.step, speed.samples_per_s) == (10, 3.25)
    assert loss is not None
    assert (loss.step, loss.loss, loss.step_s) == (20, 2.5431, 0.512)


def test_a_torchtitan_line_in_colours_is_read():
    found = parse(
        "[titan] 2026-11-29 10:00:00,1 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.1234  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.2  \x1b[33mmemory: 12.34GiB(15.53%)  \x1b[34mtps: 12,345  "
        "\x1b[36mtflops: 123.45  \x1b[35mmfu: 12.48%\x1b[39m"
    )
    assert found is not None
    assert (found.step, found.loss, found.tokens_per_s, found.grad_norm) == (10, 7.1234, 12345.0, 1.2)
    assert found.mfu == pytest.approx(0.1248)


def test_a_megatron_line_is_read():
    found = parse(
        " [2026-11-29 10:00:00] iteration       30/     500 | consumed samples:          960 | elapsed time"
        " per iteration (ms): 512.5 | throughput per GPU (TFLOP/s/GPU): 123.4 | learning rate: 1.000000E-05 |"
        " global batch size:    32 | lm loss: 1.034567E+01 | loss scale: 1.0 | grad norm: nan | number of"
        " skipped iterations:   0 | number of nan iterations:   1 |"
    )
    assert found is not None
    assert (found.step, found.max_steps, found.loss) == (30, 500, 10.34567)
    assert found.step_s == 0.5125
    assert found.samples_per_s == pytest.approx(32 / 0.5125)
    assert found.grad_norm is not None
    assert math.isnan(found.grad_norm)


def test_other_lines_are_not_progress():
    for line in (
        "",
        "{'a': 1}",
        "Loading checkpoint shards: 100%",
        "step one is to read the docs",
        "[rank0]: ValueError: loss: is bad",
        "{'train_runtime': 12.0, 'epoch': 1.0}",
    ):
        assert parse(line) is None, line


def test_bars_of_data_preparation_are_not_training_steps():
    follower = ProgressFollower()
    assert not follower.feed("Map (num_proc=4):  50%|█████     | 500/1000 [00:05<00:05, 100.0 examples/s]")
    assert not follower.feed("Loading weights:  50%|█████     | 5/10 [00:05<00:05, 1.0it/s]")
    assert follower.latest.step is None
    assert follower.feed("  5%|▌     | 5/100 [00:10<03:10,  2.00s/it]")
    assert (follower.latest.step, follower.latest.max_steps, follower.latest.step_s) == (5, 100, 2.0)


def test_lines_of_one_run_are_merged():
    follower = ProgressFollower()
    follower.feed("  5%|▌     | 5/100 [00:10<03:10,  2.00s/it]")
    follower.feed("{'loss': '2.5', 'grad_norm': '1.0', 'learning_rate': '1e-05', 'epoch': '0.05'}")
    follower.feed("  6%|▌     | 6/100 [00:12<03:08,  2.00s/it]")
    latest = follower.latest
    assert (latest.step, latest.loss, latest.source) == (6, 2.5, "transformers")
    assert not follower.hidden_nan


def test_a_clean_loss_beside_a_nan_gradient_is_noticed():
    follower = ProgressFollower()
    follower.feed("{'loss': '2.5', 'grad_norm': 'nan', 'learning_rate': '1e-05', 'epoch': '0.05'}")
    assert follower.hidden_nan


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': np.float64(2.5), 'grad_norm': np.float32(0.5), 'epoch': 0.5}",
        "{'loss': tensor(2.5, device='cuda:0', grad_fn=<NllLossBackward0>), 'grad_norm': tensor(0.5)}",
        "{'loss': '3.0', 'grad_norm': '1'}{'loss': '2.5', 'grad_norm': '0.5'}",
        '{"loss": 2.5, "grad_norm": "0.5", "tag": "a{b}"}',
    ],
)
def test_values_are_read_however_a_dict_shows_them(text):
    found = parse(text)
    assert found is not None
    assert (found.loss, found.grad_norm) == (2.5, 0.5)


@pytest.mark.parametrize(
    "lines",
    [
        ["{'loss': '2.5',", " 'grad_norm': '0.5',", " 'memory/max_active (GiB)': '9.5'}"],
        ["{", '  "step": 40,', '  "loss": 2.5,', '  "grad_norm": 0.5', "}"],
    ],
)
def test_a_dict_over_several_lines_is_read_once_it_is_closed(lines):
    follower = ProgressFollower()
    for line in lines[:-1]:
        follower.feed(line[: len(line) // 2], ended=False)  # as a reader meets a line that is being written
        assert not follower.feed(line)
    assert follower.feed(lines[-1])
    assert (follower.latest.loss, follower.latest.grad_norm) == (2.5, 0.5)
    assert follower.feed("{'loss': '2.25'}")
    assert follower.latest.loss == 2.25


def test_the_mean_loss_of_the_summary_is_not_the_newest_loss():
    follower = ProgressFollower()
    follower.feed("{'loss': '1.5', 'epoch': '1'}")
    follower.feed("{'train_runtime': '123', 'train_loss': '2.75', 'epoch': '1'}")
    assert follower.latest.loss == 1.5


def test_the_bar_of_an_evaluation_is_not_the_training():
    follower = ProgressFollower()
    follower.feed(" 10%|█     | 20/200 [00:10<01:30,  2.0it/s]")
    follower.feed(" 50%|█████ | 6/13 [00:01<00:01,  8.1it/s]")
    assert (follower.latest.step, follower.latest.max_steps) == (20, 200)
    follower.feed(" 11%|█     | 21/200 [00:12<01:30,  2.0it/s]")
    follower.feed("{'loss': '1.5', 'epoch': '1'}")
    assert (follower.latest.step, follower.latest.max_steps) == (21, 200)


def test_training_begun_again_with_fewer_steps_is_followed_from_its_first_loss():
    follower = ProgressFollower()
    follower.feed(" 10%|█     | 20/200 [00:10<01:30,  2.0it/s]")
    follower.feed(" 10%|█     | 2/20 [00:10<01:30,  2.0it/s]")
    follower.feed("{'loss': '1.5', 'epoch': '1'}")
    assert (follower.latest.step, follower.latest.max_steps) == (2, 20)


def test_a_bar_may_carry_the_loss():
    found = parse("Training:   5%|#5   | 10/200 [00:05<01:35,  4.00batch/s, loss=2.5, lr=1e-5]")
    assert found is not None
    assert (found.step, found.step_s, found.loss, found.lr) == (10, 0.25, 2.5, 1e-5)


def test_megatron_deepspeeds_units_and_the_pipelines_rate_are_read():
    found = parse(
        "[default7]: iteration      200/  158203 | elapsed time per iteration (s): 4.52 | learning rate:"
        " 1.2E-05 | global batch size: 256 | lm loss: 8.1E+00 | tokens per gpu per second (tgs): 1811.2 |"
    )
    assert found is not None
    assert (found.step_s, found.tokens_per_s) == (4.52, 1811.2)
    pipeline = parse("steps: 20 loss: 2.5431 iter time (s): 0.512 samples/sec: 15.6")
    assert pipeline is not None
    assert pipeline.samples_per_s == 15.6


def test_lines_that_report_a_sick_gpu_are_recognised():
    lost = gpu_fault("slurmstepd: error: NVML: Failed to get usage(15): GPU is lost")
    assert lost is not None
    fault = gpu_fault("[ 12.3] NVRM: Xid (PCI:0000:4e:00): 79, pid=1234, GPU has fallen off the bus.")
    assert fault is not None
    assert (fault.bus, fault.xid) == ("0000:4e:00", 79)
    assert gpu_fault("all GPUs are fine") is None
