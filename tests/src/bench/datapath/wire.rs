//! The rate of the wire: bytes from one process to another, over a bare QUIC stream with our TLS
//! and transport configuration, and over plain TCP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use bafs_proto::identity::{Identity, SERVER_NAME};
use bafs_proto::message::Role;
use bafs_proto::net::quic;
use bytes::Bytes;
use tokio::runtime::Runtime;

use super::file_work::MIB;
use crate::bench::measure::{Stopwatch, time_seconds};

/// Hidden first argument: this process is the far end of a wire.
pub(in crate::bench) const WIRE_PROCESS: &str = "--datapath-wire";

/// Which way bytes go, as seen from the near end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransferDirection {
    Read,
    Write,
}

/// The far end, in a process of its own.
pub(super) struct FarEnd {
    child: Child,
    quic: String,
    tcp: String,
    identity: PathBuf,
    runtime: Runtime,
}

impl FarEnd {
    pub(super) fn start(identity: &Path) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(WIRE_PROCESS)
            .arg(identity)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("standard output is piped")?;
        let mut lines = BufReader::new(stdout).lines();
        let mut line =
            || -> Result<String> { Ok(lines.next().context("the far end did not start")??) };
        let (quic, tcp) = (line()?, line()?);
        let builder = &mut tokio::runtime::Builder::new_multi_thread();
        Ok(Self {
            child,
            quic,
            tcp,
            identity: identity.to_owned(),
            // As many as an agent has.
            runtime: builder.worker_threads(2).enable_all().build()?,
        })
    }

    /// MB/s over one QUIC stream.
    pub(super) fn measure_quic(&self, direction: TransferDirection, mib: u64) -> Result<f64> {
        let identity = Identity::load(&self.identity.join("scheduler"), Role::Scheduler)?;
        self.runtime.block_on(async {
            let endpoint = quic::client_endpoint(&identity)?;
            let connection = endpoint.connect(self.quic.parse()?, SERVER_NAME)?.await?;
            let watch = Stopwatch::start();
            let (mut send, mut receive) = connection.open_bi().await?;
            send.write_all(&encode_request(direction, mib)).await?;
            let mut received = 0;
            if direction == TransferDirection::Write {
                let piece = Bytes::from(vec![7; MIB as usize]);
                for _ in 0..mib {
                    send.write_chunk(piece.clone()).await?;
                }
            }
            send.finish()?;
            while let Some(piece) = receive.read_chunk(usize::MAX, true).await? {
                received += piece.bytes.len() as u64;
            }
            let took = watch.elapsed().as_secs_f64();
            let expected = if direction == TransferDirection::Read {
                mib * MIB
            } else {
                1
            };
            ensure!(received == expected, "{received} bytes came");
            Ok((mib * MIB) as f64 / took / 1e6)
        })
    }

    /// MB/s over TCP, without encryption.
    pub(super) fn measure_tcp(&self, direction: TransferDirection, mib: u64) -> Result<f64> {
        let mut stream = TcpStream::connect(&self.tcp)?;
        let (took, ()) = time_seconds(|| {
            stream.write_all(&encode_request(direction, mib))?;
            let mut piece = vec![7; MIB as usize];
            for _ in 0..mib {
                match direction {
                    TransferDirection::Read => stream.read_exact(&mut piece)?,
                    TransferDirection::Write => stream.write_all(&piece)?,
                }
            }
            if direction == TransferDirection::Write {
                stream.read_exact(&mut [0])?;
            }
            Ok(())
        })?;
        Ok((mib * MIB) as f64 / took / 1e6)
    }
}

impl Drop for FarEnd {
    fn drop(&mut self) {
        // It ends with its standard input.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn encode_request(direction: TransferDirection, mib: u64) -> [u8; 9] {
    let mut request = [u8::from(direction == TransferDirection::Write); 9];
    request[1..].copy_from_slice(&mib.to_le_bytes());
    request
}

fn parse_request(request: [u8; 9]) -> (TransferDirection, u64) {
    let [direction, mib @ ..] = request;
    let direction = if direction == 0 {
        TransferDirection::Read
    } else {
        TransferDirection::Write
    };
    (direction, u64::from_le_bytes(mib))
}

/// Is the far end until standard input ends. Argument: directory of identities.
pub(in crate::bench) fn run_wire_process(arguments: &[String]) -> Result<()> {
    let [identity] = arguments else {
        bail!("the far end needs identities");
    };
    let identity = Identity::load(&Path::new(identity).join("server"), Role::Server)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let endpoint = {
        let _inside = runtime.enter();
        quic::server_endpoint("127.0.0.1:0", &identity)?
    };
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}\n{}", endpoint.local_addr()?, listener.local_addr()?);
    std::io::stdout().flush()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // The near end sees what goes wrong.
            let _ = serve_tcp(stream);
        }
    });
    runtime.spawn(async move {
        while let Some(incoming) = endpoint.accept().await {
            tokio::spawn(async move {
                let connection = incoming.await?;
                let (mut send, mut receive) = connection.accept_bi().await?;
                let mut request = [0; 9];
                receive.read_exact(&mut request).await?;
                let (direction, mib) = parse_request(request);
                match direction {
                    TransferDirection::Read => {
                        let piece = Bytes::from(vec![7; MIB as usize]);
                        for _ in 0..mib {
                            send.write_chunk(piece.clone()).await?;
                        }
                    }
                    TransferDirection::Write => {
                        while receive.read_chunk(usize::MAX, true).await?.is_some() {}
                        send.write_all(&[1]).await?;
                    }
                }
                send.finish()?;
                connection.closed().await;
                anyhow::Ok(())
            });
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new())?;
    runtime.shutdown_background();
    Ok(())
}

fn serve_tcp(mut stream: TcpStream) -> Result<()> {
    let mut request = [0; 9];
    stream.read_exact(&mut request)?;
    let (direction, mib) = parse_request(request);
    let mut piece = vec![7; MIB as usize];
    for _ in 0..mib {
        match direction {
            TransferDirection::Read => stream.write_all(&piece)?,
            TransferDirection::Write => stream.read_exact(&mut piece)?,
        }
    }
    if direction == TransferDirection::Write {
        stream.write_all(&[1])?;
    }
    Ok(())
}
