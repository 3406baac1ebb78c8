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

type Waiting = Option<BTreeMap<u32, oneshot::Sender<Reply>>>;

/// A connection to a server.
pub(super) struct Session {
    line: Arc<Line>,
    complaint: Arc<Mutex<String>>,
    /// Names of what the server can beyond the version.
    extensions: Vec<String>,
    tasks: Vec<JoinHandle<()>>,
    _child: Child,
}

/// What requests and replies share.
struct Line {
    requests: mpsc::UnboundedSender<Vec<u8>>,
    /// Who waits for which reply; `None` after the end.
    waiting: Mutex<Waiting>,
    next: AtomicU32,
    /// Packets that came.
    heard: AtomicU64,
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
        let (requests, outgoing) = mpsc::unbounded_channel();
        let line = Arc::new(Line {
            requests,
            waiting: Mutex::new(Some(BTreeMap::new())),
            next: AtomicU32::new(1),
            heard: AtomicU64::default(),
        });
        let tasks = vec![
            tokio::spawn(send(stdin, outgoing)),
            tokio::spawn(receive(stdout, line.clone())),
            listening,
        ];
        Ok(Self {
            line,
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
        self.line.waiting().is_none()
    }

    /// Sends a request now; the reply is waited for. Requests of one session are done in order by
    /// the servers that we know, and answered each by its number.
    pub(super) fn ask(
        &self,
        kind: Kind,
        fill: impl FnOnce(&mut Packet) -> &mut Packet,
    ) -> BoxFuture<'static, Result<Reply>> {
        let (sender, reply) = oneshot::channel();
        let id = self.line.send(kind, fill, Some(sender));
        let line = self.line.clone();
        let mut asked = Asked { line, id, reply };
        let complaint = self.complaint.clone();
        Box::pin(async move {
            loop {
                let before = asked.line.heard.load(Ordering::Relaxed);
                if let Ok(reply) = tokio::time::timeout(SILENCE, &mut asked.reply).await {
                    return reply.map_err(|_| refused(&complaint));
                }
                if asked.line.heard.load(Ordering::Relaxed) == before {
                    // Everybody's wait is over, and the next call opens another session.
                    asked.line.waiting().take();
                    let text = "the SFTP server does not answer; another session is opened";
                    return Err(Error::new(ErrorCode::Unreachable, text));
                }
            }
        })
    }

    /// Closes what the server holds open, now; nobody waits for the reply.
    pub(super) fn close(&self, handle: &[u8]) {
        self.line.close(handle);
    }
}

impl Line {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, whose reply goes to `waiter`; its number.
    fn send(
        &self,
        kind: Kind,
        fill: impl FnOnce(&mut Packet) -> &mut Packet,
        waiter: Option<oneshot::Sender<Reply>>,
    ) -> u32 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut packet = Packet::new(kind, id);
        fill(&mut packet);
        if let (Some(waiting), Some(waiter)) = (self.waiting().as_mut(), waiter) {
            waiting.insert(id, waiter);
        }
        let _ = self.requests.send(packet.finish());
        id
    }

    fn close(&self, handle: &[u8]) {
        self.send(Kind::Close, |it| it.bytes(handle), None);
    }

    /// A reply that nobody took. The server would hold open for ever what it opened.
    fn refuse(&self, reply: Reply) {
        if let Reply::Handle(handle) = reply {
            self.close(&handle);
        }
    }
}

/// A request whose reply somebody may wait for; forgotten when nobody does.
struct Asked {
    line: Arc<Line>,
    id: u32,
    reply: oneshot::Receiver<Reply>,
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(waiting) = self.line.waiting().as_mut() {
            waiting.remove(&self.id);
        }
        // It may have come between the last look and now.
        self.reply.close();
        if let Ok(reply) = self.reply.try_recv() {
            self.line.refuse(reply);
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

async fn receive(mut stdout: ChildStdout, line: Arc<Line>) {
    while let Some(body) = read_packet(&mut stdout).await {
        line.heard.fetch_add(1, Ordering::Relaxed);
        let Some((id, reply)) = Reply::parse(body) else {
            break;
        };
        let waiter = line.waiting().as_mut().and_then(|it| it.remove(&id));
        let left = match waiter {
            Some(waiter) => waiter.send(reply).err(),
            None => Some(reply),
        };
        left.into_iter().for_each(|reply| line.refuse(reply));
    }
    *line.waiting() = None;
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
