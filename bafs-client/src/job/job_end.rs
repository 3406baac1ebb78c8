//! How a job ended: from what the sandbox reports and what its volumes lost to the outcome that the
//! scheduler acts on.

use std::time::Duration;

use bafs_proto::message::JobOutcome;
use bafs_proto::{Error, ErrorCode};

use super::{JobEnd, JobInterruption};
use crate::sandbox::{self, NotStarted, NotStartedReason};
use crate::volume_health::VolumeLoss;

pub(super) fn classify_end(
    ended: Result<sandbox::SandboxReport, JobInterruption>,
    late_loss: Option<VolumeLoss>,
) -> JobEnd {
    let (ended, loss) = match ended {
        Ok(report) => (report, late_loss),
        Err(JobInterruption::VolumeLost(loss)) => {
            return JobEnd::environment_failure(loss.error, Some(loss.volume));
        }
        Err(JobInterruption::Environment(error)) => {
            return JobEnd::environment_failure(error, None);
        }
    };
    let usage = ended.usage.unwrap_or_default();
    let mut not_started = None;
    // A job that stumbled over a lost volume ended by itself, but not for its own reasons.
    if let Some(VolumeLoss { volume, error }) = loss {
        return add_times(
            JobEnd::environment_failure(error, Some(volume)),
            ended.wall,
            usage,
        );
    }
    let outcome = match ended.outcome {
        sandbox::SandboxOutcome::Exited(code) => JobOutcome::Exited(code),
        sandbox::SandboxOutcome::Signaled(signal) => JobOutcome::Signaled(signal),
        sandbox::SandboxOutcome::Killed(_) => JobOutcome::Killed,
        sandbox::SandboxOutcome::NotStarted(refusal) => {
            not_started = Some(refusal.reason);
            not_started_outcome(refusal)
        }
        sandbox::SandboxOutcome::Interrupted(why) => {
            JobOutcome::EnvironmentFailed(Error::new(ErrorCode::ServerFault, why))
        }
    };
    let mut end = JobEnd::environment_failure(interrupted_error(), None);
    end.report.outcome = outcome;
    end.not_started = not_started;
    end.warnings = ended.warnings;
    add_times(end, ended.wall, usage)
}

fn add_times(mut end: JobEnd, wall: Duration, usage: sandbox::JobUsage) -> JobEnd {
    end.report.wall_ms = u64::try_from(wall.as_millis()).unwrap_or(u64::MAX);
    end.report.cpu_ms = (usage.user_us + usage.system_us) / 1000;
    end.report.memory_bytes_max = usage.resident_bytes_max;
    end
}

/// A program that cannot start is the job's fault; a machine that cannot start it is not.
fn not_started_outcome(refusal: NotStarted) -> JobOutcome {
    use NotStartedReason as Reason;
    match refusal.reason {
        Reason::ExecutableMissing
        | Reason::ExecutableNotExecutable
        | Reason::InterpreterMissing
        | Reason::ExecutableBadFormat
        | Reason::DirectoryUnusable
        | Reason::StreamUnusable
        | Reason::PathUnusable
        | Reason::CommandTooLong
        | Reason::Refused => JobOutcome::NotStarted(refusal.message),
        Reason::VolumeUnusable | Reason::NameSpaceRefused | Reason::IdentityRefused => {
            let code = environment_code(refusal.errno);
            JobOutcome::EnvironmentFailed(Error::new(code, refusal.message))
        }
    }
}

/// A machine that is short of something may have it later; anything else it lacks for good.
pub(super) fn environment_code(errno: Option<i32>) -> ErrorCode {
    use nix::libc;
    match errno {
        Some(
            libc::EAGAIN
            | libc::ENOMEM
            | libc::EMFILE
            | libc::ENFILE
            | libc::ENOSPC
            | libc::EBUSY
            | libc::EINTR
            | libc::EIO,
        ) => ErrorCode::ServerFault,
        _ => ErrorCode::Unsupported,
    }
}

pub(super) fn interrupted_error() -> Error {
    Error::new(ErrorCode::ServerFault, "the job was interrupted")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_start_failures_differ_from_missing_support() {
        let outcome = |errno| {
            not_started_outcome(NotStarted {
                reason: NotStartedReason::NameSpaceRefused,
                errno: Some(errno),
                message: "no name space".to_owned(),
            })
        };
        let code = |outcome| match outcome {
            JobOutcome::EnvironmentFailed(error) => error.code,
            other => panic!("{other:?}"),
        };
        assert_eq!(code(outcome(nix::libc::EPERM)), ErrorCode::Unsupported);
        assert_eq!(code(outcome(nix::libc::EAGAIN)), ErrorCode::ServerFault);
    }
}
