//! What agent and job stages say to each other over one socket pair, and the descriptors that
//! travel with it. Also the lifeline: its end means that the other side is dead.

use std::ffi::OsString;
use std::io::{self, BufRead, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::limits::PLAN_BYTES_MAX;
use super::outcome::{JobUsage, NotStarted};
use super::plan::JobPlan;
use super::privilege::Privilege;

/// The job's standard streams; no other descriptor travels.
const DESCRIPTORS_MAX: usize = 3;

/// Agent to job: everything needed to start it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct JobOrder {
    pub(super) plan: JobPlan,
    pub(super) privilege: Privilege,
    /// Where the agent's own mount points are; an [`OsString`] as it need not be text.
    pub(super) mount_base: OsString,
    /// How many files the agent could have open when it started; it raises that for itself only.
    pub(super) descriptor_limit: Option<u64>,
    /// Standard input, output and error.
    pub(super) streams: [StreamSpec; 3],
}

/// One standard stream of the job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum StreamSpec {
    Null,
    /// The next of the descriptors that came with the order.
    Passed,
    /// A file in the job's name space.
    Path(OsString),
}

/// Agent to job, once it runs.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum ControlRequest {
    /// Pass this signal to every process of the job.
    Signal(i32),
    /// Kill every process of the job.
    Kill,
}

/// Job to agent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum StageReport {
    /// The job's init exists; its process id as the agent sees it.
    Init(i32),
    NotStarted(NotStarted),
    /// The program runs.
    Started {
        /// Host entries that it cannot see.
        missing: Vec<String>,
        /// What a user must know to understand a failure of the job.
        warnings: Vec<String>,
    },
    /// The job's main process ended.
    Ended(ProcessEnd),
    /// No process of the job is left but its init, which now exits.
    Usage(JobUsage),
}

/// How the kernel says that a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ProcessEnd {
    Exited(i32),
    Signaled(i32),
}

impl StreamSpec {
    pub(super) fn from_path(path: PathBuf) -> Self {
        Self::Path(path.into_os_string())
    }
}

/// Sends the order and its descriptors.
pub(super) fn send_order(
    socket: &UnixStream,
    order: &JobOrder,
    descriptors: &[OwnedFd],
) -> io::Result<()> {
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // Descriptors ride on a byte; a byte of their own keeps the text apart from them.
    sendmsg(
        socket,
        &[IoSlice::new(b"+")],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    send_message(socket, order)
}

/// Receives the order's descriptors; the order itself follows as a line.
pub(super) fn receive_descriptors(socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut byte)];
    let received = recvmsg(socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(rights.flatten().collect())
}

/// Receives the order's text.
pub(super) fn receive_order(reader: &mut impl BufRead) -> io::Result<JobOrder> {
    receive_message(reader, PLAN_BYTES_MAX)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Sends one message as a line; a single write, so that two senders cannot mix.
pub(super) fn send_message(mut socket: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Receives one line; `None` when the other side is gone.
pub(super) fn receive_message<T: DeserializeOwned>(
    reader: &mut impl BufRead,
    bytes_max: u64,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    let length = match reader.take(bytes_max).read_until(b'\n', &mut line) {
        // The other side died with our words unread; for us the same as its end.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
        result => result?,
    };
    if length == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    #[test]
    fn messages_and_end_of_stream_are_received() {
        let (one, other) = UnixStream::pair().unwrap();
        send_message(&one, &ControlRequest::Signal(15)).unwrap();
        send_message(&one, &ControlRequest::Kill).unwrap();
        drop(one);
        let mut reader = BufReader::new(other);
        let mut next = || receive_message::<ControlRequest>(&mut reader, 100).unwrap();
        assert!(matches!(next(), Some(ControlRequest::Signal(15))));
        assert!(matches!(next(), Some(ControlRequest::Kill)));
        assert!(next().is_none());
    }

    #[test]
    fn a_line_over_the_limit_is_refused() {
        let (one, other) = UnixStream::pair().unwrap();
        send_message(
            &one,
            &StageReport::Started {
                missing: vec!["x".repeat(200)],
                warnings: vec![],
            },
        )
        .unwrap();
        assert!(receive_message::<StageReport>(&mut BufReader::new(other), 100).is_err());
    }
}
