//! The process of an agent, with its standard streams: the program started anew, or a copy of a
//! process that waits for that. Knows no job.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::time::Duration;

use bafs_proto::agent_order::{AgentOrder, AgentStarted};
use bafs_proto::net::channel;
use bafs_proto::net::packets::PacketSocket;
use rustix::process::{Signal, pidfd_send_signal};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::ExecutorConfig;

/// Longest time for a copy to be made.
const SPAWN_TIMEOUT: Duration = Duration::from_secs(5);

/// An agent's process; dropping it kills it.
#[derive(Debug)]
pub(super) struct AgentProcess {
    kind: ProcessKind,
    pid: Option<u32>,
}

#[derive(Debug)]
enum ProcessKind {
    Child(Child),
    /// A copy, by the descriptor of its process.
    Copy(AsyncFd<OwnedFd>),
}

/// The node's ends of an agent's standard input, output and error.
#[derive(Debug)]
pub(super) struct AgentStreams {
    pub(super) input: Sender,
    pub(super) output: Receiver,
    pub(super) errors: Receiver,
}

/// The agent's own ends.
struct OwnStreams {
    input: PipeReader,
    output: PipeWriter,
    errors: PipeWriter,
}

impl AgentProcess {
    /// Number of the process; nothing once it has ended and is collected.
    pub(super) fn id(&self) -> Option<u32> {
        self.pid
    }

    /// Waits for its end, and says what is known of it.
    pub(super) async fn wait(&mut self) -> io::Result<String> {
        match &mut self.kind {
            ProcessKind::Child(child) => Ok(child.wait().await?.to_string()),
            ProcessKind::Copy(descriptor) => {
                // It stays readable.
                drop(descriptor.readable().await?);
                Ok("an unknown status".to_owned())
            }
        }
    }

    /// Kills it, and waits for its end.
    pub(super) async fn kill(&mut self) -> io::Result<()> {
        match &mut self.kind {
            ProcessKind::Child(child) => child.kill().await,
            ProcessKind::Copy(descriptor) => {
                kill_copy(descriptor);
                self.wait().await.map(drop)
            }
        }
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        if let ProcessKind::Copy(descriptor) = &self.kind {
            kill_copy(descriptor);
        }
    }
}

fn kill_copy(descriptor: &AsyncFd<OwnedFd>) {
    // One that is dead already is as good.
    let _ = pidfd_send_signal(descriptor.get_ref(), Signal::KILL);
}

/// Starts agents.
#[derive(Debug, Default)]
pub(super) struct AgentSpawner {
    /// Runs while copies can be made.
    process: Mutex<Option<SpawnerProcess>>,
}

#[derive(Debug)]
struct SpawnerProcess {
    socket: PacketSocket,
    _child: Child,
}

impl AgentSpawner {
    /// Starts an agent: as a copy where the node wants that and it works, else as the program anew.
    ///
    /// # Errors
    /// The system gives no process or pipe.
    pub(super) async fn start(
        &self,
        config: &ExecutorConfig,
        order: AgentOrder,
    ) -> io::Result<(AgentProcess, AgentStreams)> {
        let (streams, own) = make_streams()?;
        let copied = match config.copies_agents {
            true => self.start_copy(config, &order, &own).await,
            false => None,
        };
        let process = match copied {
            Some(process) => process,
            None => start_program(config, &order, own)?,
        };
        Ok((process, streams))
    }

    async fn start_copy(
        &self,
        config: &ExecutorConfig,
        order: &AgentOrder,
        own: &OwnStreams,
    ) -> Option<AgentProcess> {
        let mut process = self.process.lock().await;
        let asking = async {
            if process.is_none() {
                *process = Some(start_spawner(config)?);
            }
            let spawner = process.as_ref().ok_or(io::ErrorKind::NotConnected)?;
            spawner.start_agent(order, own).await
        };
        let asked = tokio::time::timeout(SPAWN_TIMEOUT, asking).await;
        match asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(process) => Some(process),
            Err(error) => {
                tracing::warn!(%error, "no agent as a copy; the program is started anew");
                // The next agent has another one.
                *process = None;
                None
            }
        }
    }
}

impl SpawnerProcess {
    async fn start_agent(&self, order: &AgentOrder, own: &OwnStreams) -> io::Result<AgentProcess> {
        let bytes = serde_json::to_vec(order)?;
        let OwnStreams {
            input,
            output,
            errors,
        } = own;
        let streams = [input.as_fd(), output.as_fd(), errors.as_fd()];
        self.socket.send(&bytes, &streams).await?;
        let received = self.socket.receive().await?;
        let (bytes, mut files) = received.ok_or(io::ErrorKind::UnexpectedEof)?;
        let AgentStarted { pid } = serde_json::from_slice(&bytes)?;
        let descriptor = files.pop().ok_or(io::ErrorKind::InvalidData)?;
        #[expect(deprecated, reason = "sound for a descriptor that it owns")]
        let descriptor = AsyncFd::new(descriptor)?;
        Ok(AgentProcess {
            kind: ProcessKind::Copy(descriptor),
            pid: Some(pid),
        })
    }
}

/// What all agents of a node are started with.
fn agent_command(config: &ExecutorConfig) -> Command {
    let memory = config.memory_bytes.map(|bytes| format!("{bytes} B"));
    let mut command = Command::new(&config.program);
    command
        .arg("agent")
        .arg("--identity")
        .arg(&config.identity)
        .envs(memory.map(|memory| ("BAFS_MEMORY", memory)))
        .env("BAFS_CHANNEL", channel::current_channel().name())
        // Ctrl-C on the node's terminal is for the node, which ends its agents itself.
        .process_group(0)
        .kill_on_drop(true);
    command
}

fn start_spawner(config: &ExecutorConfig) -> io::Result<SpawnerProcess> {
    let (socket, theirs) = PacketSocket::pair_for_child()?;
    let child = agent_command(config)
        .arg("--spawner")
        .stdin(theirs)
        .stdout(Stdio::null())
        .spawn()?;
    Ok(SpawnerProcess {
        socket,
        _child: child,
    })
}

fn start_program(
    config: &ExecutorConfig,
    order: &AgentOrder,
    own: OwnStreams,
) -> io::Result<AgentProcess> {
    let mut command = agent_command(config);
    if let Some(group) = &order.control_group {
        command.arg("--control-group").arg(group);
    }
    let child = command
        .arg("--temporary-directory")
        .arg(&order.temporary_directory)
        .arg("--shared-memory")
        .arg(format!("{} B", order.shared_memory_bytes))
        .arg("--output-prefix")
        .arg(&order.output_prefix)
        .stdin(own.input)
        .stdout(own.output)
        .stderr(own.errors)
        .spawn()?;
    let pid = child.id();
    Ok(AgentProcess {
        kind: ProcessKind::Child(child),
        pid,
    })
}

fn make_streams() -> io::Result<(AgentStreams, OwnStreams)> {
    let (input, to_input) = io::pipe()?;
    let (from_output, output) = io::pipe()?;
    let (from_errors, errors) = io::pipe()?;
    let streams = AgentStreams {
        input: Sender::from_owned_fd(to_input.into())?,
        output: Receiver::from_owned_fd(from_output.into())?,
        errors: Receiver::from_owned_fd(from_errors.into())?,
    };
    let own = OwnStreams {
        input,
        output,
        errors,
    };
    Ok((streams, own))
}
