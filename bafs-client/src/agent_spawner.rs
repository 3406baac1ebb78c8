//! The process that starts the agents of a node as copies of itself: to start the program anew
//! takes each job two milliseconds of a processor. Its standard input is a socket to the node, and
//! it ends with that. It has one thread and runs no job.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, exit};

use bafs_proto::agent_order::{AgentOrder, AgentStarted};
use bafs_proto::fd_passing::HANDOFF_MESSAGE_BYTES_MAX;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, setpgid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::agent::{AgentOptions, TemporaryLocation};
use crate::entry_points::agent_main;
use crate::{control_group, kernel};

/// Standard input, output and error of an agent.
const STREAMS: usize = 3;

/// How often dead agents are collected at least.
const REAP_INTERVAL: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Starts agents until the node is gone. Call it with one thread.
pub fn serve_agent_orders(identity: &Path, options: AgentOptions) -> ExitCode {
    // Whoever looks for agents finds none here.
    let _ = kernel::set_process_title(&["bafs", "agent-spawner"]);
    match serve(identity, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "agents cannot be started by copies");
            ExitCode::FAILURE
        }
    }
}

fn serve(identity: &Path, options: AgentOptions) -> io::Result<()> {
    loop {
        reap_agents();
        let stdin = io::stdin();
        if poll(
            &mut [PollFd::new(&stdin, PollFlags::IN)],
            Some(&REAP_INTERVAL),
        )? == 0
        {
            continue;
        }
        let Some((order, streams)) = receive_order()? else {
            return Ok(());
        };
        let Some(pid) = kernel::fork()? else {
            run_agent(identity, options, order, streams)
        };
        drop(streams);
        // It cannot have been collected yet.
        let raw = rustix::process::Pid::from_raw(pid.as_raw()).ok_or(io::ErrorKind::NotFound)?;
        let descriptor = pidfd_open(raw, PidfdFlags::empty())?;
        send_started(pid, &descriptor)?;
    }
}

fn reap_agents() {
    while let Ok(status) = waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            break;
        }
    }
}

/// The agent's part of a copy.
fn run_agent(
    identity: &Path,
    options: AgentOptions,
    order: AgentOrder,
    streams: [OwnedFd; STREAMS],
) -> ! {
    let prepared = || -> io::Result<()> {
        // Ctrl-C on the node's terminal is for the node, which ends its agents itself.
        setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
        let [input, output, errors] = &streams;
        dup2_stdin(input)?;
        dup2_stdout(output)?;
        dup2_stderr(errors)?;
        kernel::close_from(STREAMS as u32)
    };
    if prepared().is_err() {
        exit(1);
    }
    std::mem::forget(streams);
    let shown = identity.to_string_lossy();
    let _ = kernel::set_process_title(&["bafs", "agent", "--identity", &shown]);
    let temporary = TemporaryLocation {
        directory: order.temporary_directory,
        memory_bytes: order.shared_memory_bytes,
    };
    let prefix: PathBuf = order.output_prefix;
    if let Some(group) = order.control_group {
        control_group::set_job_group(group);
    }
    // As `main` does: the allocator and the threads of the runtime end with the process.
    let code = agent_main(identity, Some(&prefix), options, Some(temporary));
    exit(i32::from(code != ExitCode::SUCCESS))
}

/// The next order; nothing when the node is gone.
fn receive_order() -> io::Result<Option<(AgentOrder, [OwnedFd; STREAMS])>> {
    let stdin = io::stdin();
    let mut bytes = vec![0; HANDOFF_MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STREAMS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(stdin.as_fd(), &mut slices, &mut ancillary, flags)?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let streams: Vec<OwnedFd> = rights.flatten().collect();
    let streams = streams.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
    let order = serde_json::from_slice(&bytes[..received.bytes])?;
    Ok(Some((order, streams)))
}

fn send_started(pid: Pid, descriptor: &OwnedFd) -> io::Result<()> {
    let stdin = io::stdin();
    let pid = pid.as_raw().unsigned_abs();
    let bytes = serde_json::to_vec(&AgentStarted { pid })?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let slices = [IoSlice::new(&bytes)];
    sendmsg(stdin.as_fd(), &slices, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
