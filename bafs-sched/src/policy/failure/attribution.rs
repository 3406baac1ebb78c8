//! What a failure means: whose fault it is, whether the job is tried again, when it is over. What
//! follows from it is in `transition/failures.rs`. Lost volumes are `policy/failure/recovery.rs`,
//! full disks `policy/failure/full_disk.rs`.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_proto::message::JobOutcome;
use bafs_proto::{Error, ErrorClass, ErrorCode};
use bafs_workflow::JobIndex;

use super::space_refusals::describe_too_small;
use crate::decision::Decision;
use crate::describe::describe_ms;
use crate::policy::View;
use crate::state::failure_history::Away;
use crate::state::nodes::FleetNode;
use crate::state::progress::describe_signal;

/// A job is tried so often before it is believed that no node can run it: a refusal may pass.
const HOPELESS_FAULTS_MIN: u32 = 3;

/// So many nodes may say that they cannot run a job; then it is the job.
const REFUSALS_MAX: usize = 3;

/// A failure of a job's environment is forgotten after so long without another, in milliseconds.
const FORGET_MS: u64 = 3_600_000;

/// Nodes give up a home that does not answer after two minutes at most, and jobs pause for less
/// between two tries: tries further apart than this, in milliseconds, found it away twice.
const HOME_TRY_MS: u64 = 300_000;

/// So many times as many failures of the environment as hold a job back do so although most were
/// forgotten.
const ALL_FAULTS_FACTOR: u32 = 10;

/// Jobs that lose the same node within so long, in milliseconds, lost it once.
const SAME_LOSS_MS: u64 = 5_000;

/// A job is blamed for losses of nodes that chance brings together less than once in so many times.
const TELLING_ODDS: u64 = 1_000;

/// What an environment failed of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultCause {
    /// Something of its node, or nobody knows.
    Unknown,
    /// A volume that is lost.
    LostVolume,
    /// A home that does not answer.
    Home,
}

impl FaultCause {
    fn of(error: &Error) -> Self {
        if error.code == ErrorCode::HomeUnreachable {
            Self::Home
        } else if error.class() == ErrorClass::VolumeLost {
            Self::LostVolume
        } else {
            Self::Unknown
        }
    }
}

/// What the failure of an attempt means.
#[derive(Debug)]
pub(crate) enum FailureVerdict {
    /// The job's own fault: it is tried again as often as declared.
    OwnFault(String),
    /// The node cannot run this job; others may.
    Refused {
        reason: String,
        /// Whether what the job printed tells why.
        has_output: bool,
    },
    /// The node itself cannot run jobs.
    UnfitNode(Error),
    /// No fault of the job: volumes are probed, and it is tried again.
    Environment { fault: String, cause: FaultCause },
    /// No failure: the node is asked to end, and the job ended with it.
    NodeLeaves,
    /// The job fails for good.
    Final(String),
}

/// What a failed creation of a volume means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CreationVerdict {
    /// The node has no space.
    NoSpace,
    /// The environment of the jobs that need it failed.
    Environment(FaultCause),
    /// It can never be made.
    Impossible,
}

/// What follows from a node that cannot run jobs.
#[derive(Debug)]
pub(crate) enum UnfitVerdict {
    /// Others may be able to: it gets no new work.
    Quarantine,
    /// It may pass.
    TryAgain,
    /// Waiting does not help: the job fails, with this reason.
    Hopeless(String),
}

/// Judges an attempt that ended without success. Of a lack of space `space` says what to add.
pub(crate) fn judge_outcome(
    view: View<'_>,
    job: JobIndex,
    outcome: &JobOutcome,
    space: &str,
) -> FailureVerdict {
    match outcome {
        JobOutcome::Exited(code) => {
            FailureVerdict::OwnFault(format!("exited with code {code}{space}"))
        }
        JobOutcome::Signaled(signal) => {
            let signal = describe_signal(*signal);
            FailureVerdict::OwnFault(format!("was ended by {signal}{space}"))
        }
        JobOutcome::NotStarted(why) => FailureVerdict::Refused {
            reason: format!("cannot start: {why}"),
            has_output: true,
        },
        JobOutcome::EnvironmentFailed(error) => judge_reported_environment(view, job, error),
        JobOutcome::Killed => FailureVerdict::Environment {
            fault: "somebody killed it".to_owned(),
            cause: FaultCause::Unknown,
        },
    }
}

/// Judges a failure of the environment that an agent reported.
fn judge_reported_environment(view: View<'_>, job: JobIndex, error: &Error) -> FailureVerdict {
    if error.code == ErrorCode::SourceChanged {
        let reason = format!("the source of a cache changed while the workflow ran: {error}");
        FailureVerdict::Final(reason)
    } else if error.code == ErrorCode::MemoryExceeded {
        let advice = "ask for more, or declare values for further tries: 2 GB, 8 GB";
        FailureVerdict::OwnFault(format!("{}; {advice}", error.detail))
    } else if exceeds_limit(error) {
        // What it needs of the node does not depend on its volumes.
        FailureVerdict::OwnFault(error.detail.clone())
    } else if error.class() == ErrorClass::NoSpace {
        let lack = describe_too_small(view, &view.scratch_written(job));
        FailureVerdict::OwnFault(format!("{lack}: {error}"))
    } else {
        judge_environment(error)
    }
}

/// Whether a node ended a job because it used more of the node than it may.
pub(crate) fn exceeds_limit(error: &Error) -> bool {
    matches!(
        error.code,
        ErrorCode::MemoryExceeded | ErrorCode::RuntimeExceeded | ErrorCode::TemporaryFull
    )
}

/// Judges an attempt that failed by no fault of the job's program: whether another try helps, and
/// where.
pub(crate) fn judge_environment(error: &Error) -> FailureVerdict {
    match error.code {
        // What it needs is not there, which is nobody's passing weakness.
        ErrorCode::NotFound | ErrorCode::BadPath => FailureVerdict::Refused {
            reason: format!("its environment failed: {error}"),
            has_output: false,
        },
        ErrorCode::NodeLeaving => FailureVerdict::NodeLeaves,
        code if is_hopeless_there(code) => FailureVerdict::UnfitNode(error.clone()),
        _ => FailureVerdict::Environment {
            fault: error.to_string(),
            cause: FaultCause::of(error),
        },
    }
}

/// Whether an agent that fails in this way fails again in the same way on its node: the machine
/// lacks something, or does not accept who we are.
fn is_hopeless_there(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::Unsupported
            | ErrorCode::TokenInvalid
            | ErrorCode::TokenExpired
            | ErrorCode::RightMissing
            | ErrorCode::PeerRefused
            | ErrorCode::VersionMismatch
    )
}

/// Judges a volume that could not be created.
pub(crate) fn judge_creation(error: &Error) -> CreationVerdict {
    match error.class() {
        ErrorClass::NoSpace => CreationVerdict::NoSpace,
        ErrorClass::Transient | ErrorClass::VolumeLost => {
            CreationVerdict::Environment(FaultCause::of(error))
        }
        ErrorClass::Denied | ErrorClass::Invalid => CreationVerdict::Impossible,
    }
}

/// Whether a job failed by its own fault more often than declared. The last time is counted.
pub(crate) fn is_last_own_fault(view: View<'_>, job: JobIndex) -> bool {
    view.graph.job(job).failure_history.own_faults > view.graph.workflow.job(job).retries
}

/// What becomes of a job that failed by its own fault, which is counted.
pub(crate) fn judge_own_fault(
    view: View<'_>,
    job: JobIndex,
    reason: String,
    output_tail: String,
) -> Decision {
    if is_last_own_fault(view, job) {
        return Decision::Fail {
            job,
            reason,
            output_tail,
        };
    }
    let own_faults = view.graph.job(job).failure_history.own_faults;
    let pause_ms = view.settings.pause_ms(own_faults);
    Decision::Retry { job, pause_ms }
}

/// What becomes of a job that a node refused, which is noted. When none is left, or a few have said
/// the same, it fails.
pub(crate) fn judge_refusal(
    view: View<'_>,
    job: JobIndex,
    reason: String,
    output_tail: String,
) -> Decision {
    let slots = view.slots_of(job);
    let refused_by = &view.graph.job(job).failure_history.refused_by;
    let is_common = refused_by.len() >= REFUSALS_MAX;
    let is_other =
        |(id, node): (_, &FleetNode)| !refused_by.contains(&id) && node.seen.slots >= slots;
    let is_last = !view.fleet.live().any(is_other);
    match is_common || is_last {
        true => Decision::Fail {
            job,
            reason,
            output_tail,
        },
        false => Decision::Retry { job, pause_ms: 0 },
    }
}

/// What follows from a node that cannot run jobs, which is noted. When no node is left that might,
/// waiting does not help.
pub(crate) fn judge_unfit_node(
    view: View<'_>,
    job: JobIndex,
    server: ServerId,
    error: &Error,
) -> UnfitVerdict {
    let faults = view.graph.job(job).failure_history.environment.count;
    if view.fleet.is_any_fit() {
        UnfitVerdict::Quarantine
    } else if faults.saturating_add(1) < HOPELESS_FAULTS_MIN {
        UnfitVerdict::TryAgain
    } else {
        let name = view.fleet.name(server);
        UnfitVerdict::Hopeless(format!("no node can run it; node {name} reports: {error}"))
    }
}

/// Whether a failure of the environment may be the fault of the node where the job ran. What a node
/// lost with its store is no sign of a bad one.
pub(crate) fn may_be_of_node(view: View<'_>, server: ServerId, cause: FaultCause) -> bool {
    cause != FaultCause::LostVolume && !view.is_lost(server)
}

/// Whether other nodes are tried first because the environment of a job fails on this one once
/// more: what is wrong there may be told by nobody else.
pub(crate) fn fails_there_again(view: View<'_>, job: JobIndex, server: ServerId) -> bool {
    view.graph.job(job).failure_history.environment.last_on == Some(server)
}

/// For how long a job finds a home away that does so now.
pub(crate) fn extend_home_absence(view: View<'_>, job: JobIndex) -> Away {
    let now = view.now;
    let known = view.graph.job(job).failure_history.environment.away;
    // Tries of a job that waits are closer to each other than that; one that ran meanwhile begins
    // anew.
    let gap_ms = view.settings.extract_timeout_ms;
    let gap_ms = gap_ms.clamp(HOME_TRY_MS, FORGET_MS);
    let known = known.filter(|away| now.ms_since(away.last) < gap_ms);
    Away {
        tries: known.map_or(0, |away| away.tries).saturating_add(1),
        since: known.map_or(now, |away| away.since),
        last: now,
    }
}

/// What becomes of a job that found a home away: it waits for as long as results wait for it, which
/// does not count against the job. Then it fails.
pub(crate) fn judge_home_absence(
    view: View<'_>,
    job: JobIndex,
    away: Away,
    fault: &str,
) -> Decision {
    let waited_ms = view.now.ms_since(away.since);
    let left_ms = view.settings.extract_timeout_ms.saturating_sub(waited_ms);
    if left_ms == 0 {
        let time = describe_ms(waited_ms);
        return Decision::Fail {
            job,
            reason: format!("its home did not answer for {time}: {fault}"),
            output_tail: String::new(),
        };
    }
    let pause_ms = view.settings.pause_ms(away.tries).min(left_ms);
    Decision::Retry { job, pause_ms }
}

/// How long a job pauses after so many failures of its environment, the last on this node. Nobody
/// tries again where a node is gone, so that a pause would spare nothing.
pub(crate) fn retry_pause_ms(view: View<'_>, server: ServerId, faults: u32) -> u64 {
    let tries = if view.is_lost(server) { 1 } else { faults };
    view.settings.pause_ms(tries)
}

/// After a failure of its environment that is counted: a job is tried again, or held.
pub(crate) fn judge_retry(
    view: View<'_>,
    job: JobIndex,
    faults: u32,
    pause_ms: u64,
    fault: &str,
) -> Decision {
    let max = view.settings.environment_faults_max;
    let all = view.graph.job(job).failure_history.environment.all;
    // Of attempts that last an hour each failure forgets the one before.
    let is_endless = all >= max.saturating_mul(ALL_FAULTS_FACTOR);
    if faults < max && !is_endless {
        return Decision::Retry { job, pause_ms };
    }
    let faults = if is_endless { all } else { faults };
    let reason =
        format!("is held: its environment failed {faults} times, the last time because {fault}");
    Decision::Fail {
        job,
        reason,
        output_tail: String::new(),
    }
}

/// Whether another failure of a job's environment makes it fail for good.
pub(crate) fn is_last_environment_fault(view: View<'_>, job: JobIndex, cause: FaultCause) -> bool {
    let max = view.settings.environment_faults_max;
    let all = view.graph.job(job).failure_history.environment.all;
    let is_endless = all.saturating_add(1) >= max.saturating_mul(ALL_FAULTS_FACTOR);
    cause != FaultCause::Home && (count_with_next_fault(view, job) >= max || is_endless)
}

/// How many failures of a job's environment count with one now. For each hour without one one is
/// forgotten: of a job that takes days many nodes may go.
pub(crate) fn count_with_next_fault(view: View<'_>, job: JobIndex) -> u32 {
    let faults = &view.graph.job(job).failure_history.environment;
    let hours = view.now.ms_since(faults.last) / FORGET_MS;
    let hours = u32::try_from(hours).unwrap_or(u32::MAX);
    faults.count.saturating_sub(hours).saturating_add(1)
}

/// Whether the loss of a node is the one of which another job told: all jobs of a node tell of one
/// and the same.
pub(crate) fn is_known_loss(view: View<'_>, server: ServerId) -> bool {
    let last = view.last_gone.as_ref();
    last.is_some_and(|(gone, at)| *gone == server && view.now.ms_since(*at) < SAME_LOSS_MS)
}

/// Why a job fails whose nodes are lost or restarted again and again, while few nodes are lost
/// without it: it is believed to be the cause. The last loss is counted.
pub(crate) fn find_deadly_job(view: View<'_>, job: JobIndex) -> Option<String> {
    let killed = &view.graph.job(job).failure_history.killed;
    // Where all jobs run on one node, its losses tell nothing of any of them.
    let is_one_node = killed.iter().all(|gone| Some(gone) == killed.first());
    // Each loss without it asks for one more with it.
    let with = killed.len() as u64;
    let without = view.nodes_gone.saturating_sub(with);
    if is_one_node || with < telling_losses(view) + without {
        return None;
    }
    let mut times: BTreeMap<ServerId, usize> = BTreeMap::new();
    for server in killed {
        *times.entry(*server).or_default() += 1;
    }
    let name = |(server, times): (&ServerId, &usize)| match times {
        1 => view.fleet.name(*server),
        _ => format!("{}, {times} times", view.fleet.name(*server)),
    };
    let names: Vec<String> = times.iter().map(name).collect();
    let others = match without {
        0 => "and no other node was lost",
        _ => "and few other nodes were lost",
    };
    Some(format!(
        "is held: every node was lost or restarted while it ran there ({}), {others}; run the job \
         alone to find the cause",
        names.join("; ")
    ))
}

/// So many losses of nodes with a job on each are no chance: where nodes come and go, one of four
/// is lost with a job that has nothing to do with it every fourth time.
fn telling_losses(view: View<'_>) -> u64 {
    let least = view.settings.killed_nodes_max;
    let nodes = view.fleet.alive.max(2);
    // The first loss chose the job.
    let is_telling = |losses: &u32| nodes.saturating_pow(losses - 1) >= TELLING_ODDS;
    let most = least.saturating_mul(2);
    (least..most).find(is_telling).unwrap_or(most).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_errors_differ_in_what_helps() {
        let judge = |code| judge_environment(&Error::new(code, "x"));
        let missing = judge(ErrorCode::NotFound);
        assert!(matches!(missing, FailureVerdict::Refused { .. }));
        let foreign = judge(ErrorCode::PeerRefused);
        assert!(matches!(foreign, FailureVerdict::UnfitNode(_)));
        let leaving = judge(ErrorCode::NodeLeaving);
        assert!(matches!(leaving, FailureVerdict::NodeLeaves));
        let cause = |code| match judge(code) {
            FailureVerdict::Environment { cause, .. } => Some(cause),
            _ => None,
        };
        assert_eq!(cause(ErrorCode::HomeUnreachable), Some(FaultCause::Home));
        assert_eq!(cause(ErrorCode::VolumeLost), Some(FaultCause::LostVolume));
        assert_eq!(cause(ErrorCode::ServerFault), Some(FaultCause::Unknown));
    }
}
