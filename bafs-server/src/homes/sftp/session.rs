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

use super::packet::{Kind, Packet, Reply};

/// Version of the protocol.
const VERSION: u32 = 3;

/// Largest packet that is taken, in bytes; servers send 256 KiB at most.
const PACKET_BYTES_MAX: u32 = 1 << 20;

/// Bytes of what `ssh` complains that are kept for messages.
const COMPLAINT_BYTES_MAX: usize = 600;

/// A server that has sent nothing for so long, though it was asked, hangs: another session is
/// better.
const SILENCE: Duration = Duration::from_secs(30);

type Waiting = Arc<Mutex<Option<BTreeMap<u32, oneshot::Sender<Reply>>>>>;

/// A connection to a server.
pub(super) struct Session {
    requests: mpsc::UnboundedSender<Vec<u8>>,
    /// Who waits for which reply; `None` after the end.
    waiting: Waiting,
    next: AtomicU32,
    /// Packets that came.
    heard: Arc<AtomicU64>,
    complaint: Arc<Mutex<String>>,
    /// Names of what the server can beyond the version.
    extensions: Vec<String>,
    tasks: Vec<JoinHandle<()>>,
    _child: Child,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Session {
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
        let listening = tokio::spawn(listen(stderr, complaint.clone()));
        let greeted = greet(&mut stdin, &mut stdout).await;
        let Some(extensions) = greeted else {
            // It said why before it closed its streams; one that goes on is no SFTP server.
            let _ = child.start_kill();
            let _ = child.wait().await;
            let _ = listening.await;
            return Err(refused(&complaint));
        };
        let waiting: Waiting = Arc::new(Mutex::new(Some(BTreeMap::new())));
        let (requests, outgoing) = mpsc::unbounded_channel();
        let heard: Arc<AtomicU64> = Arc::default();
        let tasks = vec![
            tokio::spawn(send(stdin, outgoing)),
            tokio::spawn(receive(stdout, waiting.clone(), heard.clone())),
            listening,
        ];
        Ok(Self {
            requests,
            waiting,
            next: AtomicU32::new(1),
            heard,
            complaint,
            extensions,
            tasks,
            _child: child,
        })
    }

    /// Whether the server has an extension.
    pub(super) fn can(&self, extension: &str) -> bool {
        self.extensions.iter().any(|known| known == extension)
    }

    /// Whether the connection has ended.
    pub(super) fn is_over(&self) -> bool {
        self.lock().is_none()
    }

    /// Sends a request now; the reply is waited for. Requests of one session are done in order by
    /// the servers that we know, and answered each by its number.
    pub(super) fn ask(
        &self,
        kind: Kind,
        fill: impl FnOnce(&mut Packet) -> &mut Packet,
    ) -> BoxFuture<'static, Result<Reply>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut packet = Packet::new(kind, id);
        fill(&mut packet);
        let (sender, mut reply) = oneshot::channel();
        if let Some(waiting) = self.lock().as_mut() {
            waiting.insert(id, sender);
        }
        let _ = self.requests.send(packet.finish());
        let asked = Asked(self.waiting.clone(), id);
        let (heard, complaint) = (self.heard.clone(), self.complaint.clone());
        Box::pin(async move {
            loop {
                let before = heard.load(Ordering::Relaxed);
                if let Ok(reply) = tokio::time::timeout(SILENCE, &mut reply).await {
                    return reply.map_err(|_| refused(&complaint));
                }
                if heard.load(Ordering::Relaxed) == before {
                    // Everybody's wait is over, and the next call opens another session.
                    lock(&asked.0).take();
                    let text = "the SFTP server does not answer; another session is opened";
                    return Err(Error::new(ErrorCode::Unreachable, text));
                }
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<BTreeMap<u32, oneshot::Sender<Reply>>>> {
        lock(&self.waiting)
    }
}

fn lock(waiting: &Waiting) -> MutexGuard<'_, Option<BTreeMap<u32, oneshot::Sender<Reply>>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request whose reply somebody may wait for; forgotten when nobody does.
struct Asked(Waiting, u32);

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(waiting) = lock(&self.0).as_mut() {
            waiting.remove(&self.1);
        }
    }
}

/// Exchanges versions; the names of the server's extensions, `None` when it does not answer so.
async fn greet(stdin: &mut ChildStdin, stdout: &mut ChildStdout) -> Option<Vec<String>> {
    stdin
        .write_all(&Packet::hello(VERSION).finish())
        .await
        .ok()?;
    let body = read_packet(stdout).await?;
    Reply::greeting(&body, VERSION)
}

async fn send(mut stdin: ChildStdin, mut outgoing: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(packet) = outgoing.recv().await {
        if stdin.write_all(&packet).await.is_err() {
            return;
        }
    }
}

async fn receive(mut stdout: ChildStdout, waiting: Waiting, heard: Arc<AtomicU64>) {
    while let Some(body) = read_packet(&mut stdout).await {
        heard.fetch_add(1, Ordering::Relaxed);
        let Some((id, reply)) = Reply::parse(body) else {
            break;
        };
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waiter = waiting.as_mut().and_then(|waiting| waiting.remove(&id));
        if let Some(waiter) = waiter {
            // Who does not wait any more does not need it.
            let _ = waiter.send(reply);
        }
    }
    *waiting.lock().unwrap_or_else(PoisonError::into_inner) = None;
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

async fn listen(mut stderr: ChildStderr, complaint: Arc<Mutex<String>>) {
    let mut piece = [0; 512];
    while let Ok(count @ 1..) = stderr.read(&mut piece).await {
        let text = String::from_utf8_lossy(&piece[..count]).into_owned();
        let mut complaint = complaint.lock().unwrap_or_else(PoisonError::into_inner);
        complaint.push_str(&text);
        let excess = complaint.len().saturating_sub(COMPLAINT_BYTES_MAX);
        let start = complaint.ceil_char_boundary(excess);
        complaint.drain(..start);
    }
}

/// Why `ssh` ended, as it said.
fn refused(complaint: &Mutex<String>) -> Error {
    let complaint = complaint.lock().unwrap_or_else(PoisonError::into_inner);
    let said = complaint.split_whitespace().collect::<Vec<_>>().join(" ");
    let (code, hint) = if said.contains("Host key verification failed") {
        let hint = "put the key of the host into known_hosts";
        (ErrorCode::PeerRefused, hint)
    } else if said.contains("Permission denied") {
        let hint = "check user and key in the node's homes.toml";
        (ErrorCode::RightMissing, hint)
    } else {
        (ErrorCode::Unreachable, "the connection ended")
    };
    Error::new(code, format!("{hint} (ssh says: {said})"))
}
