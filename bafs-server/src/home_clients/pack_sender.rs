//! Small files on their way to one home server: those that come while others travel go together.
//! Nobody waits for a pack to fill, and a pack that fails fails each of its files.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::limits::{IO_BYTES_MAX, PUT_FILES_MAX, TOKEN_BYTES_MAX};
use bafs_proto::message::{PutFile, PutFiles, PutReceipt};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::oneshot;

use super::home_locations::HomeServerLocation;

/// Bytes of a pack of several files: as long on the way as a piece of a large one.
const PACK_BYTES_MAX: usize = IO_BYTES_MAX as usize;

/// Time for a pack, from when it leaves, in milliseconds: what waits for others is not late.
const PACK_TIMEOUT_MS: u64 = 60_000;

/// Packs that travel at once: while home makes the files of one durable, the next is on its way.
const CONCURRENT_PACKS_MAX: usize = 4;

/// What is to go to a home server.
pub(super) struct PackSender {
    location: HomeServerLocation,
    state: Mutex<PackQueue>,
}

#[derive(Default)]
struct PackQueue {
    waiting: VecDeque<QueuedFile>,
    /// Tasks that send.
    senders: usize,
}

/// A file that is to go. Its sender is gone when nobody wants the answer any more.
struct QueuedFile {
    file: PutFile,
    data: Bytes,
    deadline: Deadline,
    reply: oneshot::Sender<Result<PutReceipt>>,
}

impl PackSender {
    pub(super) fn new(place: HomeServerLocation) -> Arc<Self> {
        Arc::new(Self {
            location: place,
            state: Mutex::default(),
        })
    }

    /// Puts a file in place. Who drops this takes the file back, if it has not left.
    ///
    /// # Errors
    /// What home answers, about the file or the whole pack.
    pub(super) async fn put(
        self: Arc<Self>,
        file: PutFile,
        data: Bytes,
        deadline: Deadline,
    ) -> Result<PutReceipt> {
        // It would fail the whole pack, also what others send.
        if file.token.as_bytes().len() > TOKEN_BYTES_MAX {
            let text = format!("a token has at most {TOKEN_BYTES_MAX} bytes");
            return Err(Error::new(ErrorCode::TokenInvalid, text));
        }
        let (answer, told) = oneshot::channel();
        let one_more = self.lock().add(QueuedFile {
            file,
            data,
            deadline,
            reply: answer,
        });
        if one_more {
            tokio::spawn(self.send_all());
        }
        told.await.unwrap_or_else(|_| Err(interrupted_error()))
    }

    /// Sends what waits, until nothing does.
    async fn send_all(self: Arc<Self>) {
        loop {
            let pack = self.lock().take_pack();
            if pack.is_empty() {
                return;
            }
            self.send(pack).await;
        }
    }

    async fn send(&self, pack: Vec<QueuedFile>) {
        let Some(latest) = pack.iter().map(|waiting| waiting.deadline).max() else {
            return;
        };
        let data: Vec<_> = pack.iter().map(|waiting| waiting.data.clone()).collect();
        let (files, answers): (Vec<_>, Vec<_>) = pack
            .into_iter()
            .map(|waiting| (waiting.file, waiting.reply))
            .unzip();
        let token = files[0].token.clone();
        let call = PutFiles { files };
        let deadline = latest.earlier_of(Deadline::after_ms(PACK_TIMEOUT_MS));
        let told = self
            .location
            .call(&token, call, concatenate(data), deadline);
        let results = match told.await {
            Ok((told, _)) if told.results.len() == answers.len() => told.results,
            Ok((told, _)) => {
                let text = format!(
                    "home answered for {} of {} files",
                    told.results.len(),
                    answers.len()
                );
                vec![Err(Error::new(ErrorCode::Malformed, text)); answers.len()]
            }
            Err(error) => vec![Err(error); answers.len()],
        };
        for (answer, result) in answers.into_iter().zip(results) {
            // Nobody wants it any more: home has it all the same, and tells whoever asks again.
            let _ = answer.send(result);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PackQueue> {
        // No holder leaves the state half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PackQueue {
    /// Lets a file wait; whether it needs one more sender.
    fn add(&mut self, file: QueuedFile) -> bool {
        self.waiting.retain(QueuedFile::is_wanted);
        self.waiting.push_back(file);
        let one_more = self.senders < CONCURRENT_PACKS_MAX;
        self.senders += usize::from(one_more);
        one_more
    }

    /// What a sender sends next. Without any it ends, and counts no more.
    fn take_pack(&mut self) -> Vec<QueuedFile> {
        self.waiting.retain(QueuedFile::is_wanted);
        let (mut pack, mut bytes) = (Vec::new(), 0);
        while let Some(next) = self.waiting.front() {
            bytes += next.data.len();
            if pack.len() == PUT_FILES_MAX || (bytes > PACK_BYTES_MAX && !pack.is_empty()) {
                break;
            }
            pack.extend(self.waiting.pop_front());
        }
        self.senders -= usize::from(pack.is_empty());
        pack
    }
}

impl QueuedFile {
    fn is_wanted(&self) -> bool {
        !self.reply.is_closed()
    }
}

/// One after the other; a single one is not copied.
fn concatenate(mut data: Vec<Bytes>) -> Bytes {
    match data.len() {
        1 => data.remove(0),
        _ => data.concat().into(),
    }
}

fn interrupted_error() -> Error {
    let text = "the pack was interrupted on its way home";
    Error::new(ErrorCode::ServerFault, text)
}

#[cfg(test)]
mod tests {
    use bafs_proto::hash::Digest;
    use bafs_proto::ids::ExtractionId;
    use bafs_proto::message::{PutResults, Reply, Request};
    use bafs_proto::net::memory::MemoryNetwork;
    use bafs_proto::net::pool::Pool;
    use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
    use bafs_proto::token::Token;
    use futures_util::future::join_all;

    use super::*;

    const HOME: &str = "home:1";

    /// Notes how many files and bytes each pack has; refuses every file that is named so.
    #[derive(Default)]
    struct RecordingService(Mutex<Vec<(usize, usize)>>);

    impl Service for RecordingService {
        fn serve(
            self: Arc<Self>,
            incoming: IncomingRequest,
        ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
            Box::pin(async move {
                let Request::PutFiles(call) = incoming.request else {
                    panic!("{}", incoming.request.name());
                };
                let pack = (call.files.len(), incoming.body.len());
                self.0.lock().expect("lock").push(pack);
                let mut at = 0;
                let results = call.files.into_iter().map(|put| {
                    let data = &incoming.body[at..at + put.size as usize];
                    at += data.len();
                    assert_eq!(Digest::of(data), put.digest);
                    match put.path.as_str() {
                        "refused" => Err(Error::new(ErrorCode::BadPath, "no place")),
                        _ => Ok(PutReceipt {
                            extraction: put.extraction,
                            path: put.path,
                            size: put.size.into(),
                            digest: put.digest,
                        }),
                    }
                });
                let results = results.collect();
                Ok((Reply::PutFiles(PutResults { results }), Bytes::new()))
            })
        }
    }

    fn sender_fixture() -> (MemoryNetwork, Arc<RecordingService>, Arc<PackSender>) {
        let (network, home) = (MemoryNetwork::new(), Arc::new(RecordingService::default()));
        network.listen(HOME, home.clone());
        let packs = PackSender::new(HomeServerLocation::new(
            Pool::new(network.dialer("node")),
            HOME,
            None,
        ));
        (network, home, packs)
    }

    fn put(
        packs: &Arc<PackSender>,
        number: u32,
        path: &str,
        bytes: usize,
    ) -> impl Future<Output = Result<PutReceipt>> + use<> {
        let data = Bytes::from(vec![number as u8; bytes]);
        let call = PutFile {
            extraction: ExtractionId(number.into()),
            path: path.to_owned(),
            mode: 0o600,
            size: data.len() as u32,
            digest: Digest::of(&data),
            token: Token::none(),
            fence: None,
        };
        let packs = Arc::clone(packs);
        packs.put(call, data, Deadline::after_ms(20_000))
    }

    /// The largest first.
    fn recorded_packs(home: &RecordingService) -> Vec<(usize, usize)> {
        let mut noted = home.0.lock().expect("lock").clone();
        noted.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        noted
    }

    // One thread: all files wait before the first sender runs.
    #[tokio::test]
    async fn waiting_files_share_packs_with_individual_results() {
        let (_network, home, packs) = sender_fixture();
        let names = (0..130).map(|n| if n == 70 { "refused" } else { "f" });
        let sent = names.zip(0..).map(|(name, n)| put(&packs, n, name, 10));
        let told = join_all(sent).await;
        for (number, told) in told.into_iter().enumerate() {
            match told {
                Ok(receipt) => assert_eq!(receipt.extraction, ExtractionId(number as u128)),
                Err(error) => assert_eq!((number, error.code), (70, ErrorCode::BadPath)),
            }
        }
        assert_eq!(recorded_packs(&home), [(64, 640), (64, 640), (2, 20)]);
        // Nobody waits for company.
        put(&packs, 200, "f", 10).await.expect("alone");
        assert_eq!(recorded_packs(&home)[3..], [(1, 10)]);
    }

    #[tokio::test]
    async fn a_pack_is_bounded_except_for_single_files() {
        let (_network, home, packs) = sender_fixture();
        let sizes = [PACK_BYTES_MAX, 600_000, 400_000, 100_000];
        let sent = sizes.iter().zip(0..);
        let sent = sent.map(|(bytes, number)| put(&packs, number, "f", *bytes));
        assert!(join_all(sent).await.iter().all(Result::is_ok));
        assert_eq!(
            recorded_packs(&home),
            [(1, PACK_BYTES_MAX), (2, 1_000_000), (1, 100_000)]
        );
    }

    #[tokio::test]
    async fn cancelled_files_are_removed_from_their_pack() {
        let (network, home, packs) = sender_fixture();
        network.kill(HOME);
        let told = join_all((0..3).map(|number| put(&packs, number, "f", 10))).await;
        let is_away = |told: &Result<_>| told.as_ref().is_err_and(Error::is_transient);
        assert!(told.iter().all(is_away), "{told:?}");
        network.listen(HOME, home.clone());
        let mut given_up = Box::pin(put(&packs, 3, "f", 10));
        tokio::select! {
            biased;
            told = &mut given_up => panic!("{told:?}"),
            () = std::future::ready(()) => {}
        }
        drop(given_up);
        put(&packs, 4, "f", 20).await.expect("sent");
        assert_eq!(recorded_packs(&home), [(1, 20)]);
    }
}
