//! The catalog over the wire: who may tell and ask, and how long it remembers.

use std::sync::Arc;

use bafs_proto::ErrorCode;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{
    Advert, Advertise, ListVolumes, QueryServers, ReadCounters, Role, ServerKind,
};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_server::catalog::{Catalog, CatalogConfig};

fn advert(id: u64, ttl_ms: u64) -> Advert {
    Advert {
        id: ServerId(id),
        kind: ServerKind::Node,
        name: "n".to_owned(),
        address: "n:1".to_owned(),
        group: "g".to_owned(),
        ttl_ms,
        capacity_bytes: 1,
        capacity_files: 1,
        free_bytes: 1,
        free_files: 1,
        slots: 1,
        jobs: 0,
        caches: Vec::new(),
    }
}

fn short_deadline() -> Deadline {
    Deadline::after_ms(5_000)
}

#[tokio::test]
async fn servers_are_listed_until_their_adverts_expire() {
    let authority = bafs_proto::identity::Authority::generate().expect("authority");
    let grant = |rights: &[Right]| {
        authority
            .signer()
            .grant(&[Resource::Catalog], rights, Time(u64::MAX >> 1))
            .expect("token")
    };
    let (teller, asker) = (grant(&[Right::Write]), grant(&[Right::Read]));
    let network = MemoryNetwork::new();
    network.listen("c:1", Arc::new(Catalog::new(authority.signer().verifier())));
    let pool = Pool::new(network.dialer("t"));
    let tell = |token: Token, advert| {
        let pool = pool.clone();
        async move {
            pool.call("c:1", &token, Advertise { advert }, short_deadline())
                .await
        }
    };
    for (server_count, advert) in [(1, advert(1, 60_000)), (2, advert(2, 300))] {
        let told = tell(teller.clone(), advert).await.expect("told");
        assert_eq!(told.server_count, server_count);
    }
    let ask = || pool.call("c:1", &asker, QueryServers::default(), short_deadline());
    assert_eq!(
        ask().await.expect("servers").servers,
        [advert(1, 60_000), advert(2, 300)]
    );
    tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    assert_eq!(ask().await.expect("servers").servers, [advert(1, 60_000)]);

    for token in [asker.clone(), Token::none(), Token::from_bytes(vec![1; 99])] {
        let refused = tell(token, advert(3, 60_000)).await.expect_err("refused");
        assert_eq!(refused.class(), bafs_proto::ErrorClass::Denied);
    }
    let refused = pool
        .call("c:1", &teller, QueryServers::default(), short_deadline())
        .await;
    assert_eq!(refused.expect_err("refused").code, ErrorCode::RightMissing);
    let refused = pool
        .call("c:1", &teller, ReadCounters, short_deadline())
        .await;
    assert_eq!(refused.expect_err("refused").code, ErrorCode::RightMissing);
    let counters = pool
        .call("c:1", &asker, ReadCounters, short_deadline())
        .await
        .expect("counters");
    assert_eq!(counters.values.get("calls.Advertise"), Some(&5));
    let long = Advert {
        group: "x".repeat(300),
        ..advert(4, 1)
    };
    assert_eq!(
        tell(teller, long).await.expect_err("long").code,
        ErrorCode::Malformed
    );
    let other = pool
        .call("c:1", &asker, ListVolumes::default(), short_deadline())
        .await;
    assert_eq!(
        other.expect_err("no volumes here").code,
        ErrorCode::Unsupported
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_a_clear_error() {
    let authority = bafs_proto::identity::Authority::generate().expect("authority");
    let identity = authority
        .issue(Role::Server, Token::none())
        .expect("identity");
    let config = CatalogConfig {
        listen: "127.0.0.1:0".to_owned(),
        identity,
    };
    let running = bafs_server::catalog::start(config.clone())
        .await
        .expect("start");
    let taken = CatalogConfig {
        listen: running.address().to_string(),
        ..config
    };
    let error = bafs_server::catalog::start(taken)
        .await
        .expect_err("in use");
    assert_eq!(error.code, ErrorCode::Conflict);
    running.stop().await;
}
