//! Standard input of an agent that a node starts: the job in one line, then nothing until the job
//! is to be killed, which the end tells. Runs no job.

use std::io::{self, BufRead, BufReader, Read, Stdin};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use bafs_proto::message::JobSpec;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::job::StopRequest;
use crate::limits::SPEC_BYTES_MAX;
use crate::signals::StopSignal;

/// Bytes of one read of what nobody looks at.
const READ_BYTES: usize = 4096;

/// Reads the job.
pub(crate) fn read_spec(input: &mut impl BufRead) -> Result<JobSpec> {
    let malformed = |error: &dyn std::fmt::Display| {
        Error::new(
            ErrorCode::Malformed,
            format!("no job specification on standard input: {error}"),
        )
    };
    let mut line = Vec::new();
    input
        .take(SPEC_BYTES_MAX)
        .read_until(b'\n', &mut line)
        .map_err(|error| malformed(&error))?;
    serde_json::from_slice(&line).map_err(|error| malformed(&error))
}

/// Has the job killed at the end of standard input.
///
/// # Errors
/// The system gives no thread or descriptor.
pub(crate) fn watch_input_end(
    runtime: &Runtime,
    mut input: BufReader<Stdin>,
    kill: watch::Sender<StopRequest>,
) -> io::Result<()> {
    let request_kill = move || {
        kill.send_replace(StopRequest::Kill(StopSignal::Terminate));
        // Dropping the sender means the same; it must not happen earlier.
        drop(kill);
    };
    let descriptor = input.get_ref().as_fd().try_clone_to_owned()?;
    let _context = runtime.enter();
    #[expect(deprecated, reason = "sound for a descriptor that it owns")]
    let descriptor = AsyncFd::new(descriptor);
    match descriptor {
        Ok(descriptor) => {
            runtime.spawn(async move {
                wait_for_end(&descriptor).await;
                request_kill();
            });
        }
        // A file cannot be waited for, and a read of it cannot be cancelled.
        Err(_) => {
            let named = thread::Builder::new().name("bafs-stdin".to_owned());
            named.spawn(move || {
                let _ = io::copy(&mut input, &mut io::sink());
                request_kill();
            })?;
        }
    }
    Ok(())
}

async fn wait_for_end(input: &AsyncFd<OwnedFd>) {
    let mut rest = [0; READ_BYTES];
    while let Ok(mut ready) = input.readable().await {
        // The descriptor is others', too, and therefore one that blocks.
        while has_input(input.get_ref()) {
            match rustix::io::read(input.get_ref(), &mut rest) {
                Ok(0) => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
        ready.clear_ready();
    }
}

/// Whether a read returns at once.
fn has_input(input: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let looked = poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&now));
    looked.is_ok_and(|count| count > 0)
}
