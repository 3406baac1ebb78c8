//! What stands between a node and a server of others, and lets what the node sends wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A way to a server, which ends with this value.
pub(crate) struct DelayProxy {
    accepting: JoinHandle<()>,
    /// Where it listens, on 127.0.0.1.
    pub(crate) port: u16,
}

impl Drop for DelayProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl DelayProxy {
    /// A way to the server at `port`. `wait` tells how long a piece is kept that a client sends, by
    /// the number of its connection.
    pub(crate) async fn in_front_of(
        port: u16,
        wait: impl Fn(usize, &[u8]) -> Duration + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let own = listener.local_addr().expect("bound").port();
        let wait = Arc::new(wait);
        let accepting = tokio::spawn(async move {
            for number in 0.. {
                let (client, _) = listener.accept().await.expect("a client");
                let server = TcpStream::connect(("127.0.0.1", port)).await;
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.expect("the server").into_split();
                let wait = wait.clone();
                let there = move |piece: &[u8]| wait(number, piece);
                tokio::spawn(pass(from_client, to_server, there));
                tokio::spawn(pass(from_server, to_client, |_| Duration::ZERO));
            }
        });
        Self {
            accepting,
            port: own,
        }
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, wait: impl Fn(&[u8]) -> Duration) {
    let mut piece = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut piece).await {
        tokio::time::sleep(wait(&piece[..count])).await;
        if to.write_all(&piece[..count]).await.is_err() {
            return;
        }
    }
}
