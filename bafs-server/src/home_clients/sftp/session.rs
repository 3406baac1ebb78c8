//! SFTP, version 3, over the standard streams of `ssh -s HOST sftp`: packets out, packets in, many
//! at once. Knows no homes.
//!
//! `ssh` brings what a site has set up: keys, agents, jump hosts, known hosts. When this process
//! dies, the pipe to `ssh` ends, the server ends the session, and `ssh` ends with it.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::net::BoxFuture;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::packet::{SftpPacket, SftpReply, SftpRequestKind};

/// Version of the protocol.
const VERSION: u32 = 3;

/// Largest packet that is taken, in bytes; servers send 256 KiB at most.
const PACKET_BYTES_MAX: u32 = 1 << 20;

/// Bytes of what `ssh` complains that are kept for messages.
const STDERR_BYTES_MAX: usize = 600;

/// A server that has sent nothing for so long, though it was asked, hangs: another session is
/// better.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

type ReplyWaiters = Option<BTreeMap<u32, oneshot::Sender<SftpReply>>>;

/// A connection to a server.
pub(super) struct SftpSession {
    shared: Arc<SessionShared>,
    stderr_text: Arc<Mutex<String>>,
    /// Names of what the server can beyond the version.
    extensions: Vec<String>,
    tasks: Vec<JoinHandle<()>>,
    _child: Child,
}

/// What requests and replies share.
struct SessionShared {
    requests: mpsc::UnboundedSender<Vec<u8>>,
    /// Who waits for which reply; `None` after the end.
    waiters: Mutex<ReplyWaiters>,
    next_id: AtomicU32,
    /// Packets that came.
    packets_received: AtomicU64,
}

impl Drop for SftpSession {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl SftpSession {
    /// Starts `ssh` with these arguments and greets the server.
    ///
    /// # Errors
    /// `ServerFault` when there is no `ssh` here, `RightMissing` when the server or the user is
    /// not accepted, `Unreachable`.
    pub(super) async fn open(arguments: &[String]) -> Result<Self> {
        let mut child = Command::new("ssh")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| {
                let text = format!("cannot start ssh: {e}; install it on the node");
                Error::new(ErrorCode::ServerFault, text)
            })?;
        let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(mut stdout), Some(stderr)) = streams else {
            let text = "ssh started without its streams";
            return Err(Error::new(ErrorCode::ServerFault, text));
        };
        let complaint = Arc::new(Mutex::new(String::new()));
        let listening = tokio::spawn(read_stderr(stderr, complaint.clone()));
        let greeted = greet(&mut stdin, &mut stdout).await;
        let Some(extensions) = greeted else {
            // It said why before it closed its streams; one that goes on is no SFTP server.
            let _ = child.start_kill();
            let _ = child.wait().await;
            let _ = listening.await;
            return Err(connection_error(&complaint));
        };
        let (requests, outgoing) = mpsc::unbounded_channel();
        let line = Arc::new(SessionShared {
            requests,
            waiters: Mutex::new(Some(BTreeMap::new())),
            next_id: AtomicU32::new(1),
            packets_received: AtomicU64::default(),
        });
        let tasks = vec![
            tokio::spawn(send(stdin, outgoing)),
            tokio::spawn(receive(stdout, line.clone())),
            listening,
        ];
        Ok(Self {
            shared: line,
            stderr_text: complaint,
            extensions,
            tasks,
            _child: child,
        })
    }

    /// Whether the server has an extension.
    pub(super) fn has_extension(&self, extension: &str) -> bool {
        self.extensions.iter().any(|known| known == extension)
    }

    /// Whether the connection has ended.
    pub(super) fn is_over(&self) -> bool {
        self.shared.waiters().is_none()
    }

    /// Sends a request now; the reply is waited for. Requests of one session are done in order by
    /// the servers that we know, and answered each by its number.
    pub(super) fn send_request(
        &self,
        kind: SftpRequestKind,
        fill: impl FnOnce(&mut SftpPacket) -> &mut SftpPacket,
    ) -> BoxFuture<'static, Result<SftpReply>> {
        let (sender, reply) = oneshot::channel();
        let id = self.shared.send(kind, fill, Some(sender));
        let line = self.shared.clone();
        let mut asked = PendingRequest {
            shared: line,
            id,
            reply,
        };
        let complaint = self.stderr_text.clone();
        Box::pin(async move {
            loop {
                let before = asked.shared.packets_received.load(Ordering::Relaxed);
                if let Ok(reply) = tokio::time::timeout(SILENCE_TIMEOUT, &mut asked.reply).await {
                    return reply.map_err(|_| connection_error(&complaint));
                }
                if asked.shared.packets_received.load(Ordering::Relaxed) == before {
                    // Everybody's wait is over, and the next call opens another session.
                    asked.shared.waiters().take();
                    let text = "the SFTP server does not answer; opening another session";
                    return Err(Error::new(ErrorCode::Unreachable, text));
                }
            }
        })
    }

    /// Closes what the server holds open, now; nobody waits for the reply.
    pub(super) fn close(&self, handle: &[u8]) {
        self.shared.close(handle);
    }
}

impl SessionShared {
    fn waiters(&self) -> MutexGuard<'_, ReplyWaiters> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, whose reply goes to `waiter`; its number.
    fn send(
        &self,
        kind: SftpRequestKind,
        fill: impl FnOnce(&mut SftpPacket) -> &mut SftpPacket,
        waiter: Option<oneshot::Sender<SftpReply>>,
    ) -> u32 {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut packet = SftpPacket::new(kind, id);
        fill(&mut packet);
        if let (Some(waiting), Some(waiter)) = (self.waiters().as_mut(), waiter) {
            waiting.insert(id, waiter);
        }
        let _ = self.requests.send(packet.finish());
        id
    }

    fn close(&self, handle: &[u8]) {
        self.send(SftpRequestKind::Close, |it| it.bytes(handle), None);
    }

    /// A reply that nobody took. The server would hold open for ever what it opened.
    fn close_unclaimed(&self, reply: SftpReply) {
        if let SftpReply::Handle(handle) = reply {
            self.close(&handle);
        }
    }
}

/// A request whose reply somebody may wait for; forgotten when nobody does.
struct PendingRequest {
    shared: Arc<SessionShared>,
    id: u32,
    reply: oneshot::Receiver<SftpReply>,
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if let Some(waiting) = self.shared.waiters().as_mut() {
            waiting.remove(&self.id);
        }
        // It may have come between the last look and now.
        self.reply.close();
        if let Ok(reply) = self.reply.try_recv() {
            self.shared.close_unclaimed(reply);
        }
    }
}

/// Exchanges versions; the names of the server's extensions, `None` when it does not answer so.
async fn greet(stdin: &mut ChildStdin, stdout: &mut ChildStdout) -> Option<Vec<String>> {
    stdin
        .write_all(&SftpPacket::hello(VERSION).finish())
        .await
        .ok()?;
    let body = read_packet(stdout).await?;
    SftpReply::parse_greeting(&body, VERSION)
}

async fn send(mut stdin: ChildStdin, mut outgoing: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(packet) = outgoing.recv().await {
        if stdin.write_all(&packet).await.is_err() {
            return;
        }
    }
}

async fn receive(mut stdout: ChildStdout, line: Arc<SessionShared>) {
    while let Some(body) = read_packet(&mut stdout).await {
        line.packets_received.fetch_add(1, Ordering::Relaxed);
        let Some((id, reply)) = SftpReply::parse(body) else {
            break;
        };
        let waiter = line.waiters().as_mut().and_then(|it| it.remove(&id));
        let left = match waiter {
            Some(waiter) => waiter.send(reply).err(),
            None => Some(reply),
        };
        left.into_iter()
            .for_each(|reply| line.close_unclaimed(reply));
    }
    *line.waiters() = None;
}

async fn read_packet(stdout: &mut ChildStdout) -> Option<Vec<u8>> {
    let length = stdout.read_u32().await.ok()?;
    if length > PACKET_BYTES_MAX {
        return None;
    }
    let mut body = vec![0; length as usize];
    stdout.read_exact(&mut body).await.ok()?;
    Some(body)
}

async fn read_stderr(mut stderr: ChildStderr, complaint: Arc<Mutex<String>>) {
    let mut piece = [0; 512];
    while let Ok(count @ 1..) = stderr.read(&mut piece).await {
        let text = String::from_utf8_lossy(&piece[..count]).into_owned();
        let mut complaint = complaint.lock().unwrap_or_else(PoisonError::into_inner);
        complaint.push_str(&text);
        let excess = complaint.len().saturating_sub(STDERR_BYTES_MAX);
        let start = complaint.ceil_char_boundary(excess);
        complaint.drain(..start);
    }
}

/// Why `ssh` ended, as it said.
fn connection_error(complaint: &Mutex<String>) -> Error {
    let complaint = complaint.lock().unwrap_or_else(PoisonError::into_inner);
    let said = complaint.split_whitespace().collect::<Vec<_>>().join(" ");
    let (code, hint) = if said.contains("Host key verification failed") {
        let hint = "add the key of the host to known_hosts";
        (ErrorCode::PeerRefused, hint)
    } else if said.contains("Permission denied") {
        let hint = "check user and key in the node's homes.toml";
        (ErrorCode::RightMissing, hint)
    } else {
        (ErrorCode::Unreachable, "the connection ended")
    };
    Error::new(code, format!("{hint} (ssh says: {said})"))
}
