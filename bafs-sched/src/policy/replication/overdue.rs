//! Copies that take far longer than they should while a job waits for them are let go: mostly
//! their node has died, which the catalog tells only seconds later. The next copies go elsewhere,
//! until one to that node is complete.

use bafs_proto::ids::VolumeId;

use crate::policy::View;
use crate::state::overdue_copies::TIMEOUT_MS_MIN;
use crate::state::volumes::InstanceState;

/// What becomes of a copy that should have been complete.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OverdueVerdict {
    /// It is none any more.
    Ended,
    /// It holds nobody up: it is looked at again after so long, in milliseconds.
    Wait(u64),
    /// It is let go.
    LetGo,
}

/// How long a copy that begins may take before it is looked at, in milliseconds.
pub(crate) fn copy_timeout_ms(view: View<'_>, id: VolumeId) -> Option<u64> {
    let copy = view.volumes.get(id)?;
    let (_, source) = view.volumes.scratch(copy.volume)?;
    let path = (source?, copy.server?);
    let bytes = view.held_bytes(copy.volume);
    let expected_ms = view.checkpoints.expected_ms(path, bytes);
    Some(view.checkpoints.overdue.timeout_ms(expected_ms))
}

/// Judges a copy that should have been complete long ago: it is let go if it holds a job up.
pub(crate) fn judge_overdue(view: View<'_>, id: VolumeId) -> OverdueVerdict {
    let copy = view.volumes.get(id);
    let Some(copy) = copy.filter(|copy| copy.state == InstanceState::Copying) else {
        return OverdueVerdict::Ended;
    };
    if view.is_waited_for(copy.volume) {
        return OverdueVerdict::LetGo;
    }
    // Who comes to wait for it waits for half as long again; a long copy costs few looks.
    let since = view.copied_since(copy.volume, id).unwrap_or(view.now);
    OverdueVerdict::Wait((view.now.ms_since(since) / 2).max(TIMEOUT_MS_MIN))
}
