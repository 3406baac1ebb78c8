//! Every kind of fault that was found from outside, as a user meets it: what must be right now.

use anyhow::Result;

use super::{bounds, results, runs, words};

/// One kind of fault.
pub(super) struct Reproduction {
    /// What goes wrong, as a name.
    pub(super) name: &'static str,
    /// Fails with what is wrong.
    pub(super) check: Check,
}

/// How it is looked at.
pub(super) enum Check {
    /// By a small reproduction.
    Here(fn() -> Result<()>),
    /// By the run in which the scheduler is cut off, which is a figure of its own.
    CutOff,
    /// Not yet, for a reason.
    Later(&'static str),
}

const fn here(name: &'static str, check: fn() -> Result<()>) -> Reproduction {
    let check = Check::Here(check);
    Reproduction { name, check }
}

/// All of them, by weight.
pub(super) const ALL: &[Reproduction] = &[
    here(
        "temporary files are named by process number",
        results::temporary_files_named_by_pid,
    ),
    here(
        "a cache shows what the workflow extracts",
        results::cache_of_an_extract_target,
    ),
    here("names are not UTF-8", results::names_that_are_not_utf8),
    Reproduction {
        name: "the scheduler is cut off from everybody",
        check: Check::CutOff,
    },
    here(
        "the log of a failed job is lost",
        words::log_of_a_failed_job,
    ),
    here(
        "calls fail while volumes are deleted",
        results::scheduler_of_commands,
    ),
    here(
        "unknown sizes beside another user",
        runs::unknown_sizes_beside_another_user,
    ),
    here(
        "unknown sizes that one job gathers",
        runs::unknown_sizes_that_one_job_gathers,
    ),
    here(
        "full disk below a watched volume",
        runs::full_disk_below_a_watched_volume,
    ),
    here(
        "gathering job that can never run",
        runs::gathering_job_that_can_never_run,
    ),
    here("disk without inodes", runs::disk_without_inodes),
    here(
        "directory that home cannot read",
        results::unreadable_directory,
    ),
    here(
        "memory of an agent with many volumes",
        bounds::memory_of_many_volumes,
    ),
    here("token of many blocks", bounds::token_of_many_blocks),
    here(
        "store that another user made",
        bounds::store_of_another_user,
    ),
    Reproduction {
        name: "a server identity forges what caches show",
        check: Check::Later("it is mended with the identities of servers"),
    },
    here(
        "directory above a mount point",
        results::directory_above_a_mount_point,
    ),
    here(
        "attributes of a volume's top",
        results::attributes_of_the_top,
    ),
    here("journal that others can read", bounds::journals_of_others),
    here("mount again at once", bounds::mount_again_at_once),
    here(
        "descriptors of one program",
        bounds::descriptors_of_one_program,
    ),
    here("looking at names is no use", runs::looking_at_names_is_use),
    here("messages that are not so", words::messages_that_are_so),
];
