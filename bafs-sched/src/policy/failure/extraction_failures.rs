//! Files that do not get home: whether they are sent again, and of which the user is told while the
//! run goes on. `transition/extractions.rs` carries it out.

use bafs_proto::ids::VolumeId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_workflow::JobIndex;

use crate::policy::View;
use crate::state::extractions::ExtractionState;
use crate::state::failed_logs::FailedLog;
use crate::state::jobs::JobState;

/// What lasts no longer than this passes by itself, in milliseconds.
const PASSING_MS: u64 = 10_000;

/// A file that was sent for longer than this before it failed again got on meanwhile, in
/// milliseconds: nodes give up a home that does not answer after two minutes at most.
const GETS_ON_MS: u64 = 300_000;

/// A log that does not get home is tried for so long, in milliseconds: its last lines are in the
/// message of the failure anyway, and the run waits for it.
const LOG_WAIT_MS: u64 = 60_000;

/// What becomes of a file that could not be sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ExtractionVerdict {
    /// It is sent again after so long, in milliseconds.
    Retry(u64),
    /// It stays where it is.
    Keep,
}

/// What becomes of the log of a failed job that could not be sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LogVerdict {
    /// There is nothing to send.
    Missing,
    /// It is sent again after so long, in milliseconds.
    Retry(u64),
    /// The user is told that it could not be sent.
    GiveUp,
}

/// Judges a file that could not be sent home for so long; this failure is counted.
pub(crate) fn judge_extraction(
    view: View<'_>,
    index: u32,
    error: &Error,
    waited_ms: u64,
) -> ExtractionVerdict {
    let left_ms = view.settings.extract_timeout_ms.saturating_sub(waited_ms);
    if is_hopeless(error) || left_ms == 0 {
        return ExtractionVerdict::Keep;
    }
    let faults = view.extractions.faults[index as usize];
    ExtractionVerdict::Retry(view.settings.pause_ms(faults).min(left_ms))
}

/// Whether no other answer will come of this file and this place. `BadPath` is a fault of the file
/// itself.
pub(crate) fn is_hopeless(error: &Error) -> bool {
    matches!(
        error.code,
        ErrorCode::BadPath | ErrorCode::Conflict | ErrorCode::Unsupported
    )
}

/// Since when a file does not get home that could not be sent now.
pub(crate) fn failing_since(view: View<'_>, index: u32, error: &Error) -> Time {
    let known = view.extractions.failing.get(&index);
    let took_ms = view.now.ms_since(view.extractions.asked[index as usize]);
    let lasting = known.filter(|_| !error.is_transient() || took_ms <= GETS_ON_MS);
    lasting.map_or(view.now, |known| known.since)
}

/// Whether the user is told of a file that could not be sent home for so long. A refusal does not
/// pass by itself, nor does what lasts: who can mend the cause should know while the run goes on.
pub(crate) fn is_refusal_told(view: View<'_>, error: &Error, waited_ms: u64) -> bool {
    // A volume that is lost is written again, and its files are sent then.
    let passes =
        error.is_transient() && waited_ms < PASSING_MS || error.code == ErrorCode::VolumeLost;
    !passes && !view.extractions.told.contains(&error.code)
}

/// Whether the user is told of a job that has waited so long for a home: of the first that waits
/// for more than a moment, as of results.
pub(crate) fn is_home_absence_told(view: View<'_>, waited_ms: u64) -> bool {
    let told = &view.extractions.told;
    waited_ms >= PASSING_MS && !told.contains(&ErrorCode::HomeUnreachable)
}

/// Results that stay where they are when the run ends. Where one cannot be sent, or does not get
/// home soon, nobody knows yet of the others whether they can.
pub(crate) fn find_unsent(view: View<'_>) -> Vec<(u32, VolumeId)> {
    let under_way = |stage: &ExtractionState| match stage {
        ExtractionState::Sending(_, id) | ExtractionState::Paused(_, id) => Some(*id),
        _ => None,
    };
    let unsent = (0u32..).zip(view.extractions.stages.iter().map(under_way));
    let unsent = unsent.filter_map(|(index, id)| Some((index, id?)));
    let mut unsent: Vec<(u32, VolumeId)> = unsent
        .filter(|(_, id)| view.volumes.get(*id).is_some())
        .collect();
    let is_late = |index: u32| {
        let asked = view.extractions.asked[index as usize];
        view.now.ms_since(asked) >= PASSING_MS || view.extractions.failing.contains_key(&index)
    };
    if !unsent.iter().any(|(index, _)| is_late(*index)) {
        unsent.clear();
    }
    unsent
}

/// The job whose fault it is that a file to be extracted was not written: the last writer, if that
/// finished.
pub(crate) fn find_negligent_writer(view: View<'_>, index: u32) -> Option<JobIndex> {
    let volume = view.graph.workflow.extracts[index as usize].volume;
    let writers = view.graph.volume(volume).writers.iter().copied();
    let last = writers.max_by_key(|job| view.graph.rank(*job))?;
    (view.graph.state(last) == JobState::Done).then_some(last)
}

/// Judges the log of a failed job that could not be sent; this failure is not counted yet.
pub(crate) fn judge_log(view: View<'_>, log: &FailedLog, error: &Error) -> LogVerdict {
    // The volume is probed when others miss it; of a file that was not written nothing is told.
    if matches!(error.code, ErrorCode::NotFound | ErrorCode::VolumeLost) {
        return LogVerdict::Missing;
    }
    let may_pass = error.is_transient() || error.code == ErrorCode::UploadFenced;
    if may_pass && view.now.ms_since(log.since) < LOG_WAIT_MS {
        return LogVerdict::Retry(view.settings.pause_ms(log.faults + 1));
    }
    LogVerdict::GiveUp
}
