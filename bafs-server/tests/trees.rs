//! Tree sessions: epochs, fencing, leases, and answers that are given again.

use std::sync::Arc;

use bafs_proto::ErrorCode;
use bafs_proto::error::Result;
use bafs_proto::file_op::{BodyRange, Caller, FileOp, FileReply};
use bafs_proto::ids::{AgentId, Epoch, HandleId, InodeNo, VolumeId};
use bafs_proto::message::{CloseTree, OpenTree, RunFileOps, TreeRef};
use bafs_server::clock;
use bafs_server::counters::Counters;
use bafs_server::tree_sessions::{LEASE_MS, TreeSessions};
use bafs_tree::Tree;
use bytes::Bytes;
use tempfile::TempDir;

const VOLUME: TreeRef = TreeRef::Volume(VolumeId(7));

struct SessionFixture {
    root: TempDir,
    tree: Arc<Tree>,
    counters: Counters,
    sessions: TreeSessions,
}

impl SessionFixture {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("directory");
        let tree = Tree::open(root.path(), None).expect("tree");
        let counters = Counters::default();
        Self {
            root,
            tree,
            sessions: TreeSessions::new(1, counters.clone()),
            counters,
        }
    }

    async fn open(&self, writable: bool) -> Epoch {
        let call = OpenTree {
            tree: VOLUME,
            agent: AgentId(1),
            writable,
            yields: false,
            resumed_incarnation: None,
        };
        self.sessions
            .open(self.tree.clone(), call)
            .await
            .expect("open")
            .epoch
    }

    async fn run(
        &self,
        epoch: Epoch,
        sequence: u64,
        ops: Vec<FileOp>,
        body: &[u8],
    ) -> Result<(Vec<bafs_proto::file_op::FileResult>, Bytes)> {
        self.run_after(epoch, (sequence, None), ops, body).await
    }

    async fn run_after(
        &self,
        epoch: Epoch,
        (sequence, after): (u64, Option<u64>),
        ops: Vec<FileOp>,
        body: &[u8],
    ) -> Result<(Vec<bafs_proto::file_op::FileResult>, Bytes)> {
        let call = RunFileOps {
            tree: VOLUME,
            epoch,
            sequence,
            after_sequence: after,
            caller: Caller::default(),
            ops,
            assigned_numbers: Vec::new(),
        };
        let body = Bytes::copy_from_slice(body);
        self.sessions
            .run(call, body)
            .await
            .map(|(results, body)| (results.results, body))
    }

    async fn error_code(&self, epoch: Epoch) -> ErrorCode {
        self.run(epoch, 1_000_000, vec![FileOp::StatFs], b"")
            .await
            .expect_err("ended")
            .code
    }

    async fn create(&self, epoch: Epoch, name: &str) -> HandleId {
        let name = name.as_bytes().to_vec();
        let op = FileOp::Create {
            parent: InodeNo::ROOT,
            name,
            mode: 0o600,
            flags: 2,
        };
        let (results, _) = self.run(epoch, 1, vec![op], b"").await.expect("create");
        match results[0] {
            Ok(FileReply::Opened { handle, .. }) => handle,
            ref other => panic!("{other:?}"),
        }
    }
}

fn append(handle: HandleId, length: u32) -> FileOp {
    FileOp::Write {
        handle,
        offset: 0,
        data: BodyRange { start: 0, length },
        append: true,
    }
}

#[tokio::test]
async fn a_writer_fences_earlier_writers_and_no_reader() {
    let bench = SessionFixture::new();
    let reader = bench.open(false).await;
    let first = bench.open(true).await;
    let second = bench.open(true).await;
    assert!(second > first && first > reader);
    assert_eq!(bench.error_code(first).await, ErrorCode::Fenced);
    assert!(
        bench
            .run(reader, 1, vec![FileOp::StatFs], b"")
            .await
            .is_ok()
    );
    assert!(
        bench
            .run(second, 1, vec![FileOp::StatFs], b"")
            .await
            .is_ok()
    );
    assert_eq!(bench.error_code(Epoch(3)).await, ErrorCode::SessionUnknown);
    let restarted = TreeSessions::new(2, Counters::default());
    let call = OpenTree {
        tree: VOLUME,
        agent: AgentId(1),
        writable: true,
        yields: false,
        resumed_incarnation: None,
    };
    let later = restarted
        .open(bench.tree.clone(), call)
        .await
        .expect("open")
        .epoch;
    assert!(later > second, "epochs grow over a restart");
}

#[tokio::test]
async fn sessions_do_not_resume_after_machine_restarts() {
    let bench = SessionFixture::new();
    let open = |resumes| OpenTree {
        tree: VOLUME,
        agent: AgentId(1),
        writable: true,
        yields: false,
        resumed_incarnation: resumes,
    };
    let sessions = &bench.sessions;
    let first = sessions.open(bench.tree.clone(), open(None)).await;
    let machine = first.expect("open").machine_incarnation;
    let restarted = TreeSessions::new(2, Counters::default());
    let resumed = restarted.open(bench.tree.clone(), open(Some(machine)));
    assert_eq!(
        resumed.await.expect("the same machine").machine_incarnation,
        machine
    );
    let other = restarted.open(bench.tree.clone(), open(Some(machine + 1)));
    let refused = other.await.expect_err("data may be missing");
    assert_eq!(refused.code, ErrorCode::VolumeLost);
}

#[tokio::test]
async fn writers_of_a_home_tree_coexist() {
    let bench = SessionFixture::new();
    let tree = TreeRef::Home("a".to_owned());
    let call = OpenTree {
        tree: tree.clone(),
        agent: AgentId(1),
        writable: true,
        yields: false,
        resumed_incarnation: None,
    };
    let first = bench
        .sessions
        .open(bench.tree.clone(), call.clone())
        .await
        .expect("open");
    bench
        .sessions
        .open(bench.tree.clone(), call)
        .await
        .expect("open");
    let ops = vec![FileOp::StatFs];
    let (epoch, caller) = (first.epoch, Caller::default());
    let run = RunFileOps {
        tree,
        epoch,
        sequence: 1,
        after_sequence: None,
        caller,
        ops,
        assigned_numbers: Vec::new(),
    };
    assert!(bench.sessions.run(run, Bytes::new()).await.is_ok());
}

#[tokio::test]
async fn a_deleted_volume_cannot_be_reopened() {
    let bench = SessionFixture::new();
    let epoch = bench.open(true).await;
    bench.sessions.drop_tree(&VOLUME).await;
    assert_eq!(bench.error_code(epoch).await, ErrorCode::VolumeLost);
    let call = OpenTree {
        tree: VOLUME,
        agent: AgentId(1),
        writable: false,
        yields: false,
        resumed_incarnation: None,
    };
    let again = bench.sessions.open(bench.tree.clone(), call).await;
    assert_eq!(again.expect_err("lost").code, ErrorCode::VolumeLost);
    assert!(bench.sessions.is_empty());
}

#[tokio::test]
async fn a_silent_session_expires_unless_renewed() {
    let bench = SessionFixture::new();
    let epoch = bench.open(true).await;
    bench
        .sessions
        .sweep(clock::now().plus_ms(LEASE_MS - 1000))
        .await;
    assert!(bench.run(epoch, 0, Vec::new(), b"").await.is_ok());
    bench
        .sessions
        .sweep(clock::now().plus_ms(LEASE_MS + 1000))
        .await;
    assert_eq!(bench.error_code(epoch).await, ErrorCode::SessionUnknown);
    bench
        .sessions
        .close(
            &CloseTree {
                tree: VOLUME,
                epoch,
                lifetime_ms_min: 0,
            },
            |_| Ok(()),
        )
        .await
        .expect("close");
}

#[tokio::test]
async fn a_concurrently_repeated_batch_runs_once() {
    let bench = Arc::new(SessionFixture::new());
    let epoch = bench.open(true).await;
    let handle = bench.create(epoch, "log").await;
    let mut tasks = Vec::new();
    for attempt in 0..60_u64 {
        let bench = bench.clone();
        tasks.push(tokio::spawn(async move {
            bench
                .run(
                    epoch,
                    2 + attempt % 20,
                    vec![append(handle, 10)],
                    b"0123456789",
                )
                .await
        }));
    }
    for task in tasks {
        let (results, _) = task.await.expect("task").expect("run");
        assert_eq!(results, [Ok(FileReply::Written { length: 10 })]);
    }
    let size = std::fs::metadata(bench.root.path().join("log"))
        .expect("stat")
        .len();
    assert_eq!(size, 200);
    assert_eq!(bench.counters.snapshot()["file_written_bytes"], 200);
}

#[tokio::test]
async fn a_repeated_call_finds_the_earlier_answer() {
    let bench = SessionFixture::new();
    let epoch = bench.open(true).await;
    let handle = bench.create(epoch, "log").await;
    let run = bench.run(epoch, 2, vec![append(handle, 3)], b"abc");
    drop(tokio::time::timeout(std::time::Duration::ZERO, run).await);
    let (results, _) = bench
        .run(epoch, 2, vec![append(handle, 3)], b"abc")
        .await
        .expect("run");
    assert_eq!(results, [Ok(FileReply::Written { length: 3 })]);
    assert_eq!(
        std::fs::read(bench.root.path().join("log")).expect("read"),
        b"abc"
    );
}

#[tokio::test]
async fn batches_answer_each_operation_within_size_bounds() {
    let bench = SessionFixture::new();
    let epoch = bench.open(true).await;
    let handle = bench.create(epoch, "f").await;
    let read = FileOp::Read {
        handle,
        offset: 0,
        length: 1 << 20,
    };
    let mut ops = vec![append(handle, 4), append(HandleId(99), 4)];
    ops.extend(vec![read; 6]);
    let (results, body) = bench.run(epoch, 2, ops, b"data").await.expect("run");
    assert!(results[0].is_ok() && results[1].is_err());
    assert_eq!(&body[..], b"data".repeat(6));
    let many = vec![FileOp::StatFs; bafs_proto::limits::BATCH_OPS_MAX + 1];
    let refused = bench.run(epoch, 3, many, b"").await.expect_err("too many");
    assert_eq!(refused.code, ErrorCode::Malformed);
}

#[tokio::test]
async fn every_answer_fits_a_header() {
    let bench = SessionFixture::new();
    let epoch = bench.open(true).await;
    let directory = bench.root.path().join("d");
    std::fs::create_dir(&directory).expect("mkdir");
    for number in 0..4_000 {
        std::fs::write(directory.join(format!("{number:0>250}")), b"").expect("write");
    }
    std::os::unix::fs::symlink("x".repeat(4_000), bench.root.path().join("link")).expect("link");
    let lookup = |name: &str| FileOp::Lookup {
        parent: InodeNo::ROOT,
        name: name.as_bytes().to_vec(),
    };
    let found = bench
        .run(epoch, 1, vec![lookup("d"), lookup("link")], b"")
        .await;
    let [Ok(FileReply::Attr(d)), Ok(FileReply::Attr(link))] = found.expect("run").0[..] else {
        panic!("not found")
    };
    let open = FileOp::OpenDirectory { ino: d.ino };
    let (opened, _) = bench.run(epoch, 2, vec![open], b"").await.expect("open");
    let Ok(FileReply::Opened { handle, .. }) = opened[0] else {
        panic!("{opened:?}")
    };
    let list = |plus| FileOp::ReadDirectory {
        handle,
        cookie: 0,
        bytes_max: u32::MAX,
        plus,
    };
    let batches = [
        vec![list(false); 9],
        vec![list(true); 9],
        vec![FileOp::ReadLink { ino: link.ino }; bafs_proto::limits::BATCH_OPS_MAX],
    ];
    for (sequence, ops) in (3..).zip(batches) {
        let (results, _) = bench.run(epoch, sequence, ops, b"").await.expect("run");
        assert!(results[0].is_ok() && results.last().is_some_and(Result::is_err));
        let reply = bafs_proto::message::FileResults { results };
        assert!(bafs_proto::codec::encode(&reply).is_ok());
    }
}

#[tokio::test]
async fn a_failure_stops_the_rest_of_its_chain() {
    let bench = SessionFixture::new();
    let epoch = bench.open(true).await;
    let make = |name: &str| FileOp::MakeDirectory {
        parent: InodeNo::ROOT,
        name: name.into(),
        mode: 0o755,
    };
    let is_there = |name: &str| bench.root.path().join(name).exists();
    let run = |sequence, after, ops| bench.run_after(epoch, (sequence, after), ops, b"");

    let ops = vec![make("a"), make("a"), make("b"), FileOp::StatFs];
    let (results, _) = run(1, Some(0), ops).await.expect("answer");
    assert!(results[0].is_ok() && results[1].is_err() && results[2].is_err());
    assert!(results[3].is_ok(), "what the disk has tells why");
    let (results, _) = run(2, Some(1), vec![make("c")]).await.expect("answer");
    assert!(results[0].is_err());
    assert!(is_there("a") && !is_there("b") && !is_there("c"));

    // What belongs to no chain stands alone.
    let (results, _) = run(3, None, vec![make("a"), make("d")])
        .await
        .expect("answer");
    assert!(results[0].is_err() && results[1].is_ok());
    assert!(is_there("d"));
}

#[tokio::test]
async fn a_sync_waits_for_its_batch_alone() {
    let bench = SessionFixture::new();
    let epoch = bench.open(true).await;
    let handle = bench.create(epoch, "f").await;
    let make = |name: &str| FileOp::MakeDirectory {
        parent: InodeNo::ROOT,
        name: name.into(),
        mode: 0o755,
    };
    let data_only = false;
    let sync = || vec![FileOp::Fsync { handle, data_only }];
    let run = |sequence, after, ops| bench.run_after(epoch, (sequence, after), ops, b"");

    let is_there = || bench.root.path().join("a").exists();
    let synced = async {
        let synced = run(5, Some(2), sync()).await.expect("answer");
        assert!(synced.0[0].is_ok() && is_there());
    };
    let late = async {
        tokio::task::yield_now().await;
        run(2, Some(0), vec![make("a")]).await.expect("answer");
    };
    tokio::join!(synced, late);

    // The chain goes on without it, and it does not mind how far.
    run(3, Some(2), vec![make("b")]).await.expect("answer");
    let synced = run(6, Some(2), sync()).await.expect("answer");
    assert!(synced.0[0].is_ok());
    let made = run(4, Some(3), vec![make("c")]).await.expect("answer");
    assert!(made.0[0].is_ok());
}
