//! Every kind of fault that was found from outside, from a user's view, with the expected
//! behaviour.

use anyhow::Result;

use super::{bounds, messages, results, runs};

/// One kind of fault.
pub(super) struct FaultReproduction {
    /// The fault, as a name.
    pub(super) name: &'static str,
    /// Fails with the wrong behaviour.
    pub(super) check: ReproductionCheck,
}

/// How it is looked at.
pub(super) enum ReproductionCheck {
    /// By a small reproduction.
    Function(fn() -> Result<()>),
    /// By the run in which the scheduler is cut off, which is a figure of its own.
    CutOff,
    /// Not yet, for a reason.
    Pending(&'static str),
}

const fn reproduction(name: &'static str, check: fn() -> Result<()>) -> FaultReproduction {
    let check = ReproductionCheck::Function(check);
    FaultReproduction { name, check }
}

/// All of them, by weight.
pub(super) const REPRODUCTIONS: &[FaultReproduction] = &[
    reproduction(
        "temporary files are named by process number",
        results::check_temporary_files_named_by_pid,
    ),
    reproduction(
        "a cache shows what the workflow extracts",
        results::check_cache_of_extract_target,
    ),
    reproduction("names are not UTF-8", results::check_non_utf8_names),
    FaultReproduction {
        name: "the scheduler is cut off from everybody",
        check: ReproductionCheck::CutOff,
    },
    reproduction(
        "the log of a failed job is lost",
        messages::check_log_of_failed_job,
    ),
    reproduction(
        "calls fail while volumes are deleted",
        results::check_scheduler_of_commands,
    ),
    reproduction(
        "unknown sizes beside another user",
        runs::check_unknown_sizes_beside_another_user,
    ),
    reproduction(
        "unknown sizes that one job gathers",
        runs::check_gathered_unknown_sizes,
    ),
    reproduction(
        "full disk below a watched volume",
        runs::check_full_disk_below_watched_volume,
    ),
    reproduction(
        "gathering job that can never run",
        runs::check_impossible_gathering_job,
    ),
    reproduction("disk without inodes", runs::check_disk_without_inodes),
    reproduction(
        "directory that home cannot read",
        results::check_unreadable_directory,
    ),
    reproduction(
        "memory of an agent with many volumes",
        bounds::check_memory_of_many_volumes,
    ),
    reproduction("token of many blocks", bounds::check_token_of_many_blocks),
    reproduction(
        "store that another user made",
        bounds::check_store_of_another_user,
    ),
    FaultReproduction {
        name: "a server identity forges what caches show",
        check: ReproductionCheck::Pending("it is mended with the identities of servers"),
    },
    reproduction(
        "directory above a mount point",
        results::check_directory_above_mount_point,
    ),
    reproduction(
        "attributes of a volume's top",
        results::check_root_attributes,
    ),
    reproduction(
        "journal that others can read",
        bounds::check_journal_permissions,
    ),
    reproduction("mount again at once", bounds::check_immediate_remount),
    reproduction("descriptors of one program", bounds::check_descriptor_limit),
    reproduction(
        "looking at names is no use",
        runs::check_metadata_counts_as_use,
    ),
    reproduction("messages that are not so", messages::check_message_accuracy),
];
