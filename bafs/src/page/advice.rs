//! What somebody can do about a job that failed, by how its last attempt ended. The guide "A job
//! failed" has more.

use bafs_proto::message::JobOutcome;
use bafs_proto::{ErrorClass, ErrorCode};

/// Exit codes of shells: the program is there and cannot be run, or is not there.
const EXIT_NOT_EXECUTABLE: i32 = 126;
const EXIT_NOT_FOUND: i32 = 127;

const SIGILL: i32 = 4;
const SIGABRT: i32 = 6;
const SIGBUS: i32 = 7;
const SIGKILL: i32 = 9;
const SIGSEGV: i32 = 11;

/// What to do, in a sentence or two. `None`: its node reported nothing.
pub(super) fn advise(outcome: Option<&JobOutcome>) -> &'static str {
    match outcome {
        None => {
            "Look at the nodes: the last attempt ended without a report. The run starts the job \
             again elsewhere while it has retries."
        }
        Some(JobOutcome::Exited(0)) => {
            "The program succeeded, but a file that it must leave is missing. Compare the names in \
             `extract` with what the program writes."
        }
        Some(JobOutcome::Exited(EXIT_NOT_FOUND)) => {
            "A program was not found. Name it by a path that exists on all nodes, or copy it into \
             a volume of the job."
        }
        Some(JobOutcome::Exited(EXIT_NOT_EXECUTABLE)) => {
            "A program cannot be executed. Set its executable bit, and check that it is built for \
             the processors of the nodes."
        }
        Some(JobOutcome::Exited(_)) => {
            "The program reports an error of its own. Read its output below, mend the program or \
             its input, and repeat the command."
        }
        Some(JobOutcome::Signaled(SIGKILL)) => {
            "The program was killed, mostly for lack of memory. Ask for more with `request_memory`."
        }
        Some(JobOutcome::Signaled(SIGILL | SIGABRT | SIGBUS | SIGSEGV)) => {
            "The program crashed. Run it alone with the same input, and debug it."
        }
        Some(JobOutcome::Signaled(_)) => {
            "A signal ended the program. Read its output, and repeat the command."
        }
        Some(JobOutcome::NotStarted(_)) => {
            "The program could not be started. Check its path and its executable bit as the job \
             sees them."
        }
        Some(JobOutcome::Killed) => "The job was stopped. Repeat the command to run it again.",
        Some(JobOutcome::EnvironmentFailed(error)) => advise_on_environment(error.code),
    }
}

fn advise_on_environment(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::MemoryExceeded => {
            "The job used more memory than it asked for. Raise `request_memory`, or list more for \
             further tries."
        }
        ErrorCode::RuntimeExceeded => {
            "The job ran longer than it may. Raise its limit, or make the job smaller."
        }
        ErrorCode::TemporaryFull => {
            "The job's temporary files take too much space. Raise `request_disk`, or write them \
             into a volume."
        }
        _ => match code.class() {
            ErrorClass::NoSpace => "A volume is too small. Declare a larger size for it.",
            ErrorClass::Denied => {
                "A right is missing. Grant the run access to the path with `bafs grant`."
            }
            ErrorClass::VolumeLost => {
                "Data of the job were lost. Repeat the command: what made them runs again."
            }
            ErrorClass::Transient => {
                "A server did not answer. Check nodes, homes and the network with `bafs servers` \
                 and `bafs doctor`, and repeat the command."
            }
            ErrorClass::Invalid => {
                "A node could not provide what the job needs. `bafs why` shows each attempt."
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::Error;

    use super::*;

    #[test]
    fn every_failure_has_advice() {
        let environments = ErrorCode::ALL.iter();
        let environments =
            environments.map(|code| JobOutcome::EnvironmentFailed(Error::new(*code, "x")));
        let others = [0, 1, 126, 127].map(JobOutcome::Exited);
        let signals = [9, 11, 15].map(JobOutcome::Signaled);
        let outcomes = environments.chain(others).chain(signals);
        for outcome in outcomes.chain([JobOutcome::Killed]).map(Some).chain([None]) {
            let advice = advise(outcome.as_ref());
            assert!(advice.ends_with('.') && advice.len() < 200, "{advice}");
        }
        let memory = Error::new(ErrorCode::MemoryExceeded, "x");
        let memory = JobOutcome::EnvironmentFailed(memory);
        assert!(advise(Some(&memory)).contains("request_memory"));
    }
}
