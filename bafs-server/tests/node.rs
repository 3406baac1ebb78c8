//! A node as a whole: rights on every kind of request, presence in the catalog, trees, QUIC.

use std::sync::Arc;

use crate::test_nodes::{ALL, FOREVER, NodeCluster, spec};
use bafs_proto::fd_passing::{GetHandoffTicket, HandoffTarget};
use bafs_proto::file_op::{Caller, FileOp};
use bafs_proto::hash::Digest;
use bafs_proto::identity::Authority;
use bafs_proto::ids::{
    AgentId, BlockIndex, Epoch, ExecutionId, ExtractionId, FileIndex, InodeNo, VolumeId,
};
use bafs_proto::message::{
    BlockRange, CacheRef, CloseTree, CreateVolume, DeleteVolume, ExtractFile, FetchPriority,
    FetchScope, GetVolume, InvalidateVolume, JobCommand, JobLimits, JobSpec, KillJob, ListSource,
    OpenTree, Probe, ProbePurpose, Promote, QueryServers, ReadBlocks, ReadCounters, ReadManifest,
    RenewVolumes, Reply, Request, RunFileOps, SourceIdentity, StartJob, Touch, TreeRef, WatchJobs,
};
use bafs_proto::net::{Cancellation, IncomingRequest, Peer, Service};
use bafs_proto::replica::{ListVolumeTree, ReadVolumeFile};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::volume::ResizeVolume;
use bafs_proto::{ErrorClass, ErrorCode, Result};
use bafs_server::catalog::Catalog;
use bafs_server::node::Node;

const V: VolumeId = VolumeId(1);

pub(crate) async fn call_node(node: &Arc<Node>, token: &Token, request: Request) -> Result<Reply> {
    call_from(node, "t", token, request).await
}

async fn call_from(node: &Arc<Node>, peer: &str, token: &Token, request: Request) -> Result<Reply> {
    let peer = Peer {
        role: bafs_proto::message::Role::Agent,
        address: peer.to_owned(),
    };
    let body = bytes::Bytes::new();
    let (token, deadline) = (token.clone(), Deadline::after_ms(2_000));
    let (_waiting, awaited) = Cancellation::new();
    let incoming = IncomingRequest {
        peer,
        token,
        request,
        body,
        deadline,
        cancellation: awaited,
    };
    node.clone().serve(incoming).await.map(|(reply, _)| reply)
}

fn run_ops(epoch: Epoch, sequence: u64, ops: Vec<FileOp>) -> RunFileOps {
    let caller = Caller {
        uid: 0,
        gid: 0,
        pid: 0,
    };
    RunFileOps {
        tree: TreeRef::Volume(V),
        epoch,
        sequence,
        after_sequence: None,
        caller,
        ops,
        assigned_numbers: Vec::new(),
    }
}

/// Every request that a node answers, with the one right that it needs.
#[expect(clippy::too_many_lines, reason = "a table: one line for each request")]
fn rights_table(writer: Epoch) -> Vec<(Request, Resource, Right)> {
    let volume = || Resource::Volume(V);
    let manifest = Digest::of(b"m");
    let identity = SourceIdentity {
        size: 0,
        mtime_ns: 0,
        ctime_ns: 0,
    };
    let tree = || TreeRef::Volume(V);
    let range = |cache| BlockRange {
        cache,
        manifest,
        file: FileIndex(0),
        first: BlockIndex(0),
        count: 1,
    };
    let blocks = |cache| ReadBlocks {
        range: range(cache),
        scope: FetchScope::AnyNode,
        priority: FetchPriority::Urgent,
        must_verify: false,
    };
    let shared = || range(CacheRef::Cooperative("db".to_owned()));
    let probe = Probe {
        range: shared(),
        purpose: ProbePurpose::Presence,
        must_verify: false,
    };
    let extract = ExtractFile {
        volume: V,
        path: "f".to_owned(),
        selections: Vec::new(),
        extraction: ExtractionId(1),
        home_address: "h:1".to_owned(),
        home_id: None,
        target_path: "t".to_owned(),
        home_token: Token::none(),
        fence: None,
    };
    let read = ReadVolumeFile {
        volume: V,
        path: "f".to_owned(),
        identity,
        offset: 0,
        length: 1,
        known_digests: Vec::new(),
    };
    let open = |writable| OpenTree {
        tree: tree(),
        agent: AgentId(1),
        writable,
        yields: false,
        resumed_incarnation: None,
    };
    let create = CreateVolume {
        server: None,
        spec: spec(1, None),
        base: None,
        source_token: Token::none(),
    };
    let cooperative = Resource::Cooperative("db".to_owned());
    let (name, command) = ("j".to_owned(), JobCommand::default());
    let job = JobSpec {
        name,
        command,
        mounts: Vec::new(),
        op_deadline_ms: 1_000,
        limits: JobLimits::default(),
    };
    let job = StartJob {
        execution: ExecutionId(1),
        job,
    };
    vec![
        (create.into(), volume(), Right::Manage),
        (GetVolume { volume: V }.into(), volume(), Right::Manage),
        (
            RenewVolumes {
                volumes: vec![V],
                lifetime_ms: 0,
                gives_way: false,
            }
            .into(),
            volume(),
            Right::Manage,
        ),
        (
            ResizeVolume {
                volume: V,
                size_bytes: 1,
                size_files: None,
            }
            .into(),
            volume(),
            Right::Manage,
        ),
        (
            InvalidateVolume {
                volume: V,
                source_token: Token::none(),
            }
            .into(),
            volume(),
            Right::Manage,
        ),
        (extract.into(), volume(), Right::Manage),
        (
            ListVolumeTree {
                volume: V,
                after: None,
            }
            .into(),
            volume(),
            Right::Read,
        ),
        (read.into(), volume(), Right::Read),
        (open(false).into(), volume(), Right::Read),
        (
            run_ops(writer, 1, Vec::new()).into(),
            volume(),
            Right::Write,
        ),
        (
            CloseTree {
                tree: tree(),
                epoch: writer,
                lifetime_ms_min: 0,
            }
            .into(),
            volume(),
            Right::Write,
        ),
        // Ends the writer's session, so it comes after what needs that.
        (open(true).into(), volume(), Right::Write),
        (
            ReadManifest {
                volume: V,
                first: FileIndex(0),
            }
            .into(),
            volume(),
            Right::Read,
        ),
        (blocks(CacheRef::Volume(V)).into(), volume(), Right::Read),
        (
            blocks(CacheRef::Cooperative("db".to_owned())).into(),
            cooperative.clone(),
            Right::Read,
        ),
        (probe.into(), cooperative.clone(), Right::Read),
        (
            Promote { range: shared() }.into(),
            cooperative.clone(),
            Right::Read,
        ),
        (Touch { range: shared() }.into(), cooperative, Right::Read),
        (job.into(), Resource::Jobs, Right::Manage),
        (
            WatchJobs {
                executions: vec![ExecutionId(1)],
                wait_ms: 0,
            }
            .into(),
            Resource::Jobs,
            Right::Manage,
        ),
        (
            KillJob {
                execution: ExecutionId(1),
            }
            .into(),
            Resource::Jobs,
            Right::Manage,
        ),
        (ReadCounters.into(), Resource::Catalog, Right::Read),
        (DeleteVolume { volume: V }.into(), volume(), Right::Manage),
    ]
}

#[tokio::test(flavor = "multi_thread")]
#[expect(
    clippy::too_many_lines,
    reason = "each wrong token for each request, then the right one"
)]
async fn every_request_needs_exactly_its_right() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node("a:1", world.config(store.path())).await;
    world.create("a:1", spec(1, None)).await.expect("create");
    let open = OpenTree {
        tree: TreeRef::Volume(V),
        agent: AgentId(1),
        writable: true,
        yields: false,
        resumed_incarnation: None,
    };
    let writer = world.call("a:1", open).await.expect("open").epoch;
    let signer = world.authority.signer();
    let grant = |resource: &Resource, rights: &[Right]| {
        signer
            .grant(std::slice::from_ref(resource), rights, FOREVER)
            .expect("grant")
    };
    let stranger = Authority::generate().expect("authority");
    let denied = |result: Result<Reply>, name: &str, why: &str| {
        let class = result.as_ref().err().map(bafs_proto::Error::class);
        assert_eq!(class, Some(ErrorClass::Denied), "{name} {why}: {result:?}");
    };
    for (request, resource, right) in rights_table(writer) {
        let name = request.name();
        let others: Vec<Right> = ALL.into_iter().filter(|other| *other != right).collect();
        let elsewhere = if resource == Resource::Jobs {
            Resource::Catalog
        } else {
            Resource::Jobs
        };
        let wrong = [
            ("with no token", Token::none()),
            ("with garbage", Token::from_bytes(vec![3; 200])),
            ("with other rights", grant(&resource, &others)),
            ("with another resource", grant(&elsewhere, &ALL)),
            (
                "with another volume",
                grant(&Resource::Volume(VolumeId(2)), &ALL),
            ),
            (
                "expired",
                signer
                    .grant(&[Resource::Cluster], &ALL, Time(1))
                    .expect("grant"),
            ),
            (
                "of a stranger",
                stranger
                    .signer()
                    .grant(&[Resource::Cluster], &ALL, FOREVER)
                    .expect("grant"),
            ),
        ];
        for (why, token) in wrong {
            denied(call_node(&node, &token, request.clone()).await, name, why);
        }
        let exact = call_node(&node, &grant(&resource, &[right]), request).await;
        let class = exact.as_ref().err().map(bafs_proto::Error::class);
        assert_ne!(
            class,
            Some(ErrorClass::Denied),
            "{name} with its right: {exact:?}"
        );
    }
    for request in [
        Request::from(ListSource {
            path: String::new(),
            after: None,
        }),
        QueryServers::default().into(),
        OpenTree {
            tree: TreeRef::Home("x".to_owned()),
            agent: AgentId(1),
            writable: false,
            yields: false,
            resumed_incarnation: None,
        }
        .into(),
    ] {
        let error = call_node(&node, &world.token, request)
            .await
            .expect_err("not here");
        assert_eq!(error.code, ErrorCode::Unsupported);
    }
}

/// The kinds of calls whose right depends on a session, for a volume that nobody has.
fn session_call(kind: &str, volume: u128) -> Request {
    let (tree, epoch) = (TreeRef::Volume(VolumeId(volume)), Epoch(1));
    match kind {
        "ops" => RunFileOps {
            tree,
            ..run_ops(epoch, 1, Vec::new())
        }
        .into(),
        "close" => CloseTree {
            tree,
            epoch,
            lifetime_ms_min: u64::from(volume.is_multiple_of(2)),
        }
        .into(),
        _ => GetHandoffTicket {
            target: HandoffTarget::Tree { tree, epoch },
        }
        .into(),
    }
}

/// What a refusal costs is paid by the connection, and not by the threads that answer others.
#[tokio::test(flavor = "multi_thread")]
async fn refused_session_calls_slow_their_connection() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node("a:1", world.config(store.path())).await;
    let signer = world.authority.signer();
    let token = signer
        .grant(&[Resource::Jobs], &ALL, FOREVER)
        .expect("grant");
    for (first, kind) in [(0, "ops"), (100, "close"), (200, "ticket")] {
        let since = tokio::time::Instant::now();
        // 64 are free; the ten pauses behind the next are 10, 20, ... 100 ms.
        for volume in first..first + 75 {
            let asked = call_from(&node, kind, &token, session_call(kind, volume)).await;
            assert!(asked.is_err(), "{kind} {volume}");
        }
        let took_ms = since.elapsed().as_millis();
        assert!(took_ms >= 550, "{kind}: {took_ms} ms");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trees_serve_agents_until_the_volume_is_deleted() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node("a:1", world.config(store.path())).await;
    world.create("a:1", spec(1, None)).await.expect("create");
    let open = OpenTree {
        tree: TreeRef::Volume(V),
        agent: AgentId(1),
        writable: true,
        yields: false,
        resumed_incarnation: None,
    };
    let session = world.call("a:1", open).await.expect("open");
    let make = FileOp::MakeDirectory {
        parent: InodeNo::ROOT,
        name: b"d".to_vec(),
        mode: 0o755,
    };
    let results = world
        .call("a:1", run_ops(session.epoch, 1, vec![make]))
        .await
        .expect("run");
    assert!(results.results[0].is_ok(), "{results:?}");
    assert_eq!(
        world
            .call("a:1", GetVolume { volume: V })
            .await
            .expect("show")
            .used_files,
        1
    );
    // A session that nobody opened is unknown, whatever the token grants.
    let guess = world
        .call("a:1", run_ops(Epoch(session.epoch.0 + 1), 1, Vec::new()))
        .await;
    assert_eq!(guess.expect_err("guess").code, ErrorCode::SessionUnknown);
    // A reader's token must not ride on the writer's session.
    let reader = world
        .authority
        .signer()
        .grant(&[Resource::Volume(V)], &[Right::Read], FOREVER)
        .expect("grant");
    let ride = call_node(&node, &reader, run_ops(session.epoch, 2, Vec::new()).into()).await;
    assert_eq!(ride.expect_err("ride").code, ErrorCode::RightMissing);
    world
        .call("a:1", DeleteVolume { volume: V })
        .await
        .expect("delete");
    let late = world
        .call("a:1", run_ops(session.epoch, 2, Vec::new()))
        .await;
    assert_eq!(late.expect_err("late").code, ErrorCode::VolumeLost);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_catalog_learns_of_changes_immediately() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let catalog = Arc::new(Catalog::new(world.authority.signer().verifier()));
    world.network.listen("c:1", catalog);
    let mut config = world.config(store.path());
    config.catalog = Some("c:1".to_owned());
    let node = world.node("a:1", config).await;
    let tasks = node.start_background_tasks();
    tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    let free = || async {
        let list = world
            .call("c:1", QueryServers::default())
            .await
            .expect("servers");
        list.servers.first().map(|advert| advert.free_bytes)
    };
    assert_eq!(free().await, Some(64 << 20));
    world.create("a:1", spec(1, None)).await.expect("create");
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(free().await, Some(56 << 20));
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_nodes_group_defaults_to_its_subnet() {
    let world = NodeCluster::new();
    for (address, given, group) in [
        ("10.9.8.7:7002", "", "10.9.8.0/24"),
        ("10.9.8.7:7002", "ours", "ours"),
        ("127.0.0.1:7002", "", "loopback"),
    ] {
        let store = tempfile::tempdir().expect("store");
        let mut config = world.config(store.path());
        given.clone_into(&mut config.group);
        let node = world.node(address, config).await;
        assert_eq!(node.advert().group, group);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_starts_and_stops_over_quic() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let running = bafs_server::node::start(world.config(store.path()))
        .await
        .expect("start");
    let scheduler = world
        .authority
        .issue(bafs_proto::message::Role::Scheduler, world.token.clone())
        .expect("identity");
    let pool = bafs_server::serving::pool(&scheduler).expect("pool");
    let address = running.address().to_string();
    let call = CreateVolume {
        server: None,
        spec: spec(1, None),
        base: None,
        source_token: Token::none(),
    };
    pool.call(&address, &world.token, call, Deadline::after_ms(10_000))
        .await
        .expect("create");
    running.stop().await;
    // The same store serves again, with the volume.
    let node = world.node("a:1", world.config(store.path())).await;
    let shown = call_node(&node, &world.token, GetVolume { volume: V }.into()).await;
    assert!(matches!(shown, Ok(Reply::GetVolume(_))), "{shown:?}");
}
