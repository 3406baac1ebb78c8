//! A connection to an FTP server, plain or over TLS (RFC 4217): commands, replies, passive data
//! connections. Knows no homes.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bafs_proto::net::{ForeignTlsConnector, ForeignTlsStream};
use bafs_proto::path::{from_bytes, to_bytes};
use bafs_proto::{Error, ErrorCode, Result};
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, ReadBuf,
};
use tokio::net::TcpStream;

use super::facts;

/// Longest line of a reply, in bytes, and most lines of one.
const LINE_BYTES_MAX: u64 = 8 << 10;
const LINES_MAX: usize = 1_000;

/// Most bytes of a listing of one directory.
const LISTING_BYTES_MAX: u64 = 256 << 20;

/// How vsftpd says, with a success, that it lists nothing of a directory as it may not.
const NOT_OPENED_TEXT: &str = "failed to open directory";

/// A server that neither sends nor takes anything for so long hangs.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// A server, and how to log in there.
pub(super) struct FtpServer {
    /// `HOST:PORT`.
    pub(super) place: String,
    pub(super) user: String,
    pub(super) password: String,
    /// What secures commands and data, if anything does.
    pub(super) tls: Option<Arc<ForeignTlsConnector>>,
}

impl FtpServer {
    /// The host alone, for which its certificate must be.
    fn host(&self) -> &str {
        let host = self.place.rsplit_once(':').map_or(&*self.place, |it| it.0);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// Bytes of a connection, secured or not.
enum FtpStream {
    Plain(TcpStream),
    Secured(Box<ForeignTlsStream>),
}

/// What a server answers: a code and its lines, without the code.
#[derive(Debug)]
pub(super) struct FtpReply {
    pub(super) code: u16,
    pub(super) lines: Vec<String>,
}

/// A connection that is logged in.
pub(super) struct FtpConnection {
    stream: BufReader<FtpStream>,
    peer: SocketAddr,
    /// What secures data connections, for this host.
    tls: Option<(Arc<ForeignTlsConnector>, String)>,
    /// Whether the server knows the commands of RFC 3659.
    pub(super) has_facts: bool,
}

impl FtpConnection {
    /// Connects to `host:port` and logs in.
    ///
    /// # Errors
    /// `Unreachable`; `RightMissing` when the login is refused, or the server cannot be trusted.
    pub(super) async fn open(server: &FtpServer) -> Result<Self> {
        let FtpServer { user, password, .. } = server;
        let stream = with_silence_timeout(TcpStream::connect(&server.place)).await?;
        let peer = stream.peer_addr().map_err(|e| connection_error(&e))?;
        // Commands are small and each is waited for.
        stream.set_nodelay(true).map_err(|e| connection_error(&e))?;
        let mut this = Self {
            stream: BufReader::new(FtpStream::Plain(stream)),
            peer,
            tls: None,
            has_facts: false,
        };
        let greeting = this.reply().await?;
        if greeting.code != 220 {
            return Err(greeting.refusal_error());
        }
        if let Some(tls) = &server.tls {
            this = this.secure(tls, server.host()).await?;
        }
        let mut login = this.send_command("USER", user).await?;
        if login.code == 331 {
            login = this.send_command("PASS", password).await?;
        }
        if !matches!(login.code, 202 | 230) {
            let said = login.refusal_error();
            let text = format!(
                "the server rejects the login of '{user}'; check user and password in the node's \
                 homes.toml ({})",
                said.detail
            );
            let code = if login.code == 421 {
                ErrorCode::Busy
            } else {
                ErrorCode::RightMissing
            };
            return Err(Error::new(code, text));
        }
        this.run_command("TYPE", "I").await?;
        let features = this.send_command("FEAT", "").await?;
        let has = |name: &str| {
            let mut lines = features
                .lines
                .iter()
                .map(|line| line.trim().to_ascii_uppercase());
            lines.any(|line| line.starts_with(name))
        };
        this.has_facts = features.code == 211 && has("MLST");
        if features.code == 211 && has("UTF8") {
            this.send_command("OPTS", "UTF8 ON").await?;
        }
        Ok(this)
    }

    /// Secures the connection, and those of data to come, before anything is said that matters.
    async fn secure(mut self, tls: &Arc<ForeignTlsConnector>, host: &str) -> Result<Self> {
        let begun = self.send_command("AUTH", "TLS").await?;
        if begun.code != 234 {
            let text = "the server offers no TLS; use ftp:// if the network is trusted";
            return Err(Error::new(begun.refusal_error().code, text));
        }
        let stream = self.stream.into_inner().into_plain()?;
        self.stream = BufReader::new(secure_stream(tls, host, stream).await?);
        self.tls = Some((tls.clone(), host.to_owned()));
        self.run_command("PBSZ", "0").await?;
        self.run_command("PROT", "P").await?;
        Ok(self)
    }

    /// Sends a command and reads its reply.
    ///
    /// # Errors
    /// `BadPath` for a name that would be two commands; `Unreachable`.
    pub(super) async fn send_command(&mut self, command: &str, argument: &str) -> Result<FtpReply> {
        if argument.contains(['\r', '\n', '\0']) {
            let text = "FTP cannot transfer a name with a line break";
            return Err(Error::new(ErrorCode::BadPath, text));
        }
        let space = if argument.is_empty() { "" } else { " " };
        let line = format!("{command}{space}{argument}\r\n");
        let stream = self.stream.get_mut();
        with_silence_timeout(stream.write_all(&to_bytes(&line))).await?;
        with_silence_timeout(stream.flush()).await?;
        self.reply().await
    }

    /// Sends a command that must succeed.
    pub(super) async fn run_command(&mut self, command: &str, argument: &str) -> Result<FtpReply> {
        let reply = self.send_command(command, argument).await?;
        match reply.code {
            200..=299 => Ok(reply),
            _ => Err(reply.refusal_error()),
        }
    }

    /// Reads a file from `offset`: `length` bytes, or fewer at its end.
    pub(super) async fn read(&mut self, path: &str, offset: u64, length: u64) -> Result<Vec<u8>> {
        let data = self.transfer(offset, "RETR", path).await?;
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        let taken = receive(data, length, &mut bytes).await;
        // A server that is cut short says so, or that it is done: either is right.
        self.reply().await?;
        taken?;
        Ok(bytes)
    }

    /// Gives a file to `take`, piece by piece.
    pub(super) async fn read_all(
        &mut self,
        path: &str,
        mut take: impl FnMut(&[u8]) + Send,
    ) -> Result<()> {
        let mut data = self.transfer(0, "RETR", path).await?;
        let mut piece = vec![0; 256 << 10];
        while let count @ 1.. = with_silence_timeout(data.read(&mut piece)).await? {
            take(&piece[..count]);
        }
        self.end_of_transfer().await.map(drop)
    }

    /// Writes bytes to a file, from `offset` on, where it ends now; when this returns the server
    /// has them all.
    pub(super) async fn write(&mut self, path: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        // What is late, of a transfer that was given up, is then written where it belongs.
        let mut begun = self.transfer(offset, "STOR", path).await;
        if offset > 0
            && begun
                .as_ref()
                .is_err_and(|e| e.code != ErrorCode::Unreachable)
        {
            // Some servers restart no upload.
            self.send_command("REST", "0").await?;
            begun = self.transfer(0, "APPE", path).await;
        }
        let mut data = begun?;
        let mut left = bytes;
        while !left.is_empty() {
            let count = with_silence_timeout(data.write(left)).await?;
            left = &left[count..];
        }
        data.end_upload().await?;
        self.end_of_transfer().await.map(drop)
    }

    /// The lines that `command` lists.
    pub(super) async fn list_lines(
        &mut self,
        command: &str,
        argument: &str,
    ) -> Result<Vec<String>> {
        let data = self.transfer(0, command, argument).await?;
        let mut bytes = Vec::new();
        receive(data, LISTING_BYTES_MAX + 1, &mut bytes).await?;
        if bytes.len() as u64 > LISTING_BYTES_MAX {
            return Err(Error::new(ErrorCode::Malformed, "a listing is too long"));
        }
        let reply = self.end_of_transfer().await?;
        if bytes.is_empty()
            && reply
                .lines
                .iter()
                .any(|line| line.contains(NOT_OPENED_TEXT))
        {
            let text = format!("it says {}: {}", reply.code, reply.lines.join(" "));
            return Err(Error::new(ErrorCode::RightMissing, text));
        }
        let text = from_bytes(&bytes);
        Ok(text.lines().map(str::to_owned).collect())
    }

    async fn end_of_transfer(&mut self) -> Result<FtpReply> {
        let reply = self.reply().await?;
        match reply.code {
            200..=299 => Ok(reply),
            _ => Err(reply.refusal_error()),
        }
    }

    /// Opens a data connection and begins a transfer on it.
    async fn transfer(&mut self, offset: u64, command: &str, path: &str) -> Result<FtpStream> {
        let passive = self.send_command("EPSV", "").await?;
        let text = passive.lines.join(" ");
        let port = match passive.code {
            229 => facts::parse_extended_port(&text),
            _ => {
                let passive = self.run_command("PASV", "").await?;
                // The address that it tells is often that of its own network.
                facts::parse_passive_port(&passive.lines.join(" "))
            }
        };
        let port = port
            .ok_or_else(|| Error::new(ErrorCode::Malformed, format!("it sends no port: {text}")))?;
        let place = SocketAddr::new(self.peer.ip(), port);
        let data = with_silence_timeout(TcpStream::connect(place)).await?;
        if offset > 0 {
            let restart = self.send_command("REST", &offset.to_string()).await?;
            if restart.code != 350 {
                return Err(restart.refusal_error());
            }
        }
        let begun = self.send_command(command, path).await?;
        match begun.code {
            125 | 150 => {}
            _ => return Err(begun.refusal_error()),
        }
        match &self.tls {
            Some((tls, host)) => secure_stream(tls, host, data).await,
            None => Ok(FtpStream::Plain(data)),
        }
    }

    async fn reply(&mut self) -> Result<FtpReply> {
        let mut lines = Vec::new();
        let mut first: Option<String> = None;
        loop {
            let mut line = Vec::new();
            let mut limited = (&mut self.stream).take(LINE_BYTES_MAX);
            let read = with_silence_timeout(limited.read_until(b'\n', &mut line)).await?;
            if read == 0 || line.last() != Some(&b'\n') {
                return Err(connection_error(&"it closed the connection"));
            }
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            let code = first.get_or_insert_with(|| line.chars().take(3).collect());
            let is_coded = line.starts_with(code.as_str());
            let is_last = is_coded && line.as_bytes().get(3) != Some(&b'-');
            let text = if is_coded {
                line.get(4..).unwrap_or_default()
            } else {
                &line
            };
            lines.push(text.to_owned());
            if !is_last && lines.len() < LINES_MAX {
                continue;
            }
            let code = code.parse().map_err(|_| {
                Error::new(
                    ErrorCode::Malformed,
                    format!("it does not speak FTP: {line}"),
                )
            })?;
            return Ok(FtpReply { code, lines });
        }
    }
}

impl FtpReply {
    /// What a refusal means to the caller.
    pub(super) fn refusal_error(&self) -> Error {
        let said = self.lines.join(" ");
        let is_denied = ["ermission", "denied", "not permitted"]
            .iter()
            .any(|word| said.contains(word));
        let code = match self.code {
            421 => ErrorCode::Busy,
            452 | 552 => ErrorCode::NoSpaceBytes,
            530 | 532 | 553 => ErrorCode::RightMissing,
            550 if is_denied => ErrorCode::RightMissing,
            550 => ErrorCode::NotFound,
            500..=504 => ErrorCode::Unsupported,
            _ => ErrorCode::ServerFault,
        };
        Error::new(code, format!("it replies {}: {said}", self.code))
    }
}

impl FtpStream {
    /// The connection below a stream that is not secured yet.
    fn into_plain(self) -> Result<TcpStream> {
        match self {
            Self::Plain(stream) => Ok(stream),
            Self::Secured(_) => Err(connection_error(&"it is secured already")),
        }
    }

    /// Ends what was sent. Of a secured stream all is read that the server still sent: closing a
    /// socket with unread bytes resets it, and the server might lose the end of the file.
    async fn end_upload(mut self) -> Result<()> {
        with_silence_timeout(self.shutdown()).await?;
        if let Self::Secured(stream) = &mut self {
            let mut rest = [0; 1 << 10];
            while let Ok(1..) = with_silence_timeout(stream.read(&mut rest)).await {}
        }
        Ok(())
    }
}

impl AsyncRead for FtpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Secured(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for FtpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Secured(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Secured(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Secured(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

/// Secures a connection to a host, whose certificate must be for it.
async fn secure_stream(
    tls: &ForeignTlsConnector,
    host: &str,
    stream: TcpStream,
) -> Result<FtpStream> {
    let secured = tokio::time::timeout(SILENCE_TIMEOUT, tls.connect(host, stream)).await;
    match secured {
        Ok(Ok(stream)) => Ok(FtpStream::Secured(Box::new(stream))),
        // What a peer does wrong the library tells in this kind; what the network does, in others.
        Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
            let text = format!(
                "it cannot be trusted as {host}: {error}; name the authority of its certificate \
                 with `authorities` in the node's homes.toml"
            );
            Err(Error::new(ErrorCode::RightMissing, text))
        }
        Ok(Err(error)) => Err(connection_error(&error)),
        Err(_) => Err(connection_error(&"it does not answer the TLS handshake")),
    }
}

/// Takes what comes: `length` bytes, or fewer if it ends before.
async fn receive(data: FtpStream, length: u64, bytes: &mut Vec<u8>) -> Result<()> {
    let mut data = data.take(length);
    while with_silence_timeout(data.read_buf(bytes)).await? > 0 {}
    Ok(())
}

/// What comes of one step, if anything does before the server must be taken for dead.
async fn with_silence_timeout<T>(step: impl Future<Output = io::Result<T>>) -> Result<T> {
    match tokio::time::timeout(SILENCE_TIMEOUT, step).await {
        Ok(done) => done.map_err(|e| connection_error(&e)),
        Err(_) => {
            let text = format!("it has not answered for {} s", SILENCE_TIMEOUT.as_secs());
            Err(connection_error(&text))
        }
    }
}

fn connection_error(error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorCode::Unreachable,
        format!("the connection failed: {error}"),
    )
}
