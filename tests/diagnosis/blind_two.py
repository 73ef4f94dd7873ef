"""The truth of the second blind part of the hang zoo, fixed before its author asked ftdash about a case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`culprits` is empty where no rank is at fault; `why` says what makes the truth the truth.

    `kinds` are the verdicts that fit. Where `line` is set, the culprit's frame has to be a line of the script
    that is marked `# named`.
    """

    name: str
    world: int
    kinds: str
    culprits: tuple[int, ...] = ()
    why: str = ""
    script: str = "blind_two.py"
    hangs: bool = True
    line: bool = True


def _grpo(name: str, world: int, kinds: str, culprit: int, why: str) -> Case:
    return Case(name, world, kinds, (culprit,), why, "blind_two_trl.py")


def _near(name: str, world: int, kinds: str, why: str) -> Case:
    return Case(name, world, kinds, (), why, "blind_two_near.py", hangs=False, line=False)


OTHER = "collective-mismatch phase-mismatch"
CASES = (
    _grpo(
        "grpo_judge_never_answers",
        2,
        "rank-outside-collective",
        1,
        "rank 1 waits for an HTTP answer in TRL's thread for async rewards; rank 0 gathers the rewards",
    ),
    _grpo(
        "grpo_reward_gathers_where_it_is_good",
        3,
        OTHER,
        2,
        "rank 2 alone gathers inside its reward; the others are in TRL's own gather of the rewards",
    ),
    _grpo(
        "grpo_reward_error_swallowed",
        2,
        f"{OTHER} teardown",
        1,
        "rank 1 left train() and stands in the barrier at the script's end; rank 0 gathers the rewards",
    ),
    Case(
        "loader_worker_killed_in_its_lock",
        3,
        "data-loader lock",
        (1,),
        "rank 1 waits for new workers, which wait for the lock of the killed one; the others reduce",
    ),
    Case(
        "store_owner_stopped",
        4,
        "store network-or-hardware",
        (),
        "all ranks wait alike for a store that a stopped process owns, which is no rank",
        line=False,
    ),
    Case(
        "autograd_function_on_one",
        4,
        OTHER,
        (2,),
        "rank 2 reduces inside its backward, the others gather the losses after theirs",
    ),
    Case(
        "ddp_branch_without_gradient",
        3,
        OTHER,
        (1,),
        "rank 1 went on to gather the losses, the others wait in backward for its bucket",
    ),
    Case(
        "gathers_inside_main_process_first",
        3,
        OTHER,
        (0,),
        "rank 0 gathers inside the block that the others may not enter before it has left",
    ),
    Case(
        "group_made_by_its_members",
        8,
        f"{OTHER} rank-outside-collective",
        (0, 4),
        "ranks 0 and 4 make a group that takes all ranks to make; the others reduce",
    ),
    Case(
        "clips_gradients_on_one",
        3,
        OTHER,
        (0,),
        "rank 0 alone computes the norm of sharded gradients, the others gather for the next forward",
    ),
    Case(
        "pipeline_stage_in_other_order",
        4,
        f"{OTHER} order-mismatch",
        (2,),
        "stage 2 receives before it sends; stage 3 has nothing to work on, stages 0 and 1 no gradients",
    ),
    Case(
        "checkpoint_thread_on_dead_storage",
        3,
        "storage rank-outside-collective",
        (1,),
        "rank 1's saving thread opens its file for ever, the other threads wait for it; all main threads "
        "wait for their own thread",
    ),
    Case(
        "prints_to_a_stopped_pager",
        3,
        "rank-outside-collective storage",
        (0,),
        "rank 0 prints into a full pipe, the others reduce",
    ),
    Case(
        "post_mortem_debugger",
        2,
        "rank-outside-collective teardown",
        (1,),
        "rank 1 waits for input in the debugger of its exception hook, rank 0 reduces",
    ),
    Case(
        "thread_waits_with_the_lock",
        3,
        "lock rank-outside-collective",
        (0,),
        "rank 0's main thread wants the lock that its thread keeps while it waits for a server",
    ),
    Case(
        "signal_handler_synchronises",
        3,
        OTHER,
        (1,),
        "rank 1 is in the barrier of its signal handler, the others reduce gradients",
    ),
    _near("one_rank_three_times_slower", 4, "slow healthy", "steps go on at the pace of rank 2"),
    _near("compiles_its_first_step", 2, "slow healthy", "both ranks compile the same long model"),
    _near("evaluates_by_generating", 2, "slow healthy", "both ranks generate tokens"),
    _near("tokenizes_first_on_main", 3, "slow", "the two processes of rank 0's map tokenize"),
    _near("syncs_a_big_checkpoint", 2, "slow", "rank 0 writes and syncs shard after shard"),
    _near("waits_for_cold_files_everywhere", 2, "slow healthy", "a step whenever the loaders deliver"),
    _near("trains_without_a_word", 2, "healthy", "a step every few milliseconds"),
)
