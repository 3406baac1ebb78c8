//! The catalog over the wire: who may tell and ask, and how long it remembers.

use std::sync::Arc;

use bafs_proto::attributes::{AttributeValue, Attributes};
use bafs_proto::ids::ServerId;
use bafs_proto::message::{
    Advert, Advertise, Call, Lifetime, ListVolumes, QueryServers, ReadCounters, Role, ServerKind,
};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::{Error, ErrorCode};
use bafs_server::catalog::{Catalog, CatalogConfig};
use bafs_server::start_error::StartErrorCause;

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
        attributes: Attributes::default(),
        lifetime: Lifetime::default(),
    }
}

fn short_deadline() -> Deadline {
    Deadline::after_ms(5_000)
}

/// A catalog, with a token that may advertise and one that may read.
struct CatalogFixture {
    pool: Pool,
    writer: Token,
    reader: Token,
}

impl CatalogFixture {
    fn new() -> Self {
        let authority = bafs_proto::identity::Authority::generate().expect("authority");
        let grant = |right| {
            let (signer, end) = (authority.signer(), Time(u64::MAX >> 1));
            let token = signer.grant(&[Resource::Catalog], &[right], end);
            token.expect("token")
        };
        let network = MemoryNetwork::new();
        network.listen("c:1", Arc::new(Catalog::new(authority.signer().verifier())));
        Self {
            pool: Pool::new(network.dialer("t")),
            writer: grant(Right::Write),
            reader: grant(Right::Read),
        }
    }

    async fn call<C: Call>(&self, token: &Token, call: C) -> Result<C::Reply, Error> {
        self.pool.call("c:1", token, call, short_deadline()).await
    }

    async fn advertise(&self, advert: Advert) -> u32 {
        let answer = self.call(&self.writer, Advertise { advert }).await;
        answer.expect("advertised").server_count
    }

    async fn servers(&self) -> Vec<Advert> {
        let answer = self.call(&self.reader, QueryServers::default()).await;
        answer.expect("servers").servers
    }
}

#[tokio::test]
async fn attributes_of_unknown_types_reach_the_reader() {
    let catalog = CatalogFixture::new();
    let mut told = advert(1, 60_000);
    let later = AttributeValue::Unknown {
        kind: 200,
        bytes: vec![7; 12],
    };
    told.attributes.set("link_rates", later);
    catalog.advertise(told.clone()).await;
    assert_eq!(catalog.servers().await, [told]);
}

#[tokio::test]
async fn servers_are_listed_until_their_adverts_expire() {
    let catalog = CatalogFixture::new();
    assert_eq!(catalog.advertise(advert(1, 60_000)).await, 1);
    assert_eq!(catalog.advertise(advert(2, 300)).await, 2);
    let both = [advert(1, 60_000), advert(2, 300)];
    assert_eq!(catalog.servers().await, both);
    tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    assert_eq!(catalog.servers().await, [advert(1, 60_000)]);
}

#[tokio::test]
async fn adverts_need_the_right_to_write() {
    let catalog = CatalogFixture::new();
    let invalid = Token::from_bytes(vec![1; 99]);
    for token in [&catalog.reader, &Token::none(), &invalid] {
        let advert = advert(3, 60_000);
        let refused = catalog.call(token, Advertise { advert }).await;
        let class = refused.expect_err("refused").class();
        assert_eq!(class, bafs_proto::ErrorClass::Denied);
    }
    assert_eq!(catalog.servers().await, []);
}

#[tokio::test]
async fn catalog_queries_need_the_right_to_read() {
    let catalog = CatalogFixture::new();
    let refused = catalog.call(&catalog.writer, QueryServers::default()).await;
    assert_eq!(refused.expect_err("refused").code, ErrorCode::RightMissing);
    let refused = catalog.call(&catalog.writer, ReadCounters).await;
    assert_eq!(refused.expect_err("refused").code, ErrorCode::RightMissing);
}

#[tokio::test]
async fn the_catalog_counts_its_calls() {
    let catalog = CatalogFixture::new();
    catalog.advertise(advert(1, 60_000)).await;
    catalog.advertise(advert(2, 60_000)).await;
    let counters = catalog.call(&catalog.reader, ReadCounters).await;
    let counters = counters.expect("counters");
    assert_eq!(counters.values.get("calls.Advertise"), Some(&2));
}

#[tokio::test]
async fn adverts_with_long_names_are_malformed() {
    let catalog = CatalogFixture::new();
    let advert = Advert {
        group: "x".repeat(300),
        ..advert(4, 1)
    };
    let refused = catalog.call(&catalog.writer, Advertise { advert }).await;
    assert_eq!(refused.expect_err("long").code, ErrorCode::Malformed);
}

#[tokio::test]
async fn the_catalog_has_no_volumes() {
    let catalog = CatalogFixture::new();
    let refused = catalog.call(&catalog.reader, ListVolumes::default()).await;
    assert_eq!(refused.expect_err("volumes").code, ErrorCode::Unsupported);
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
    assert_eq!(error.cause, StartErrorCause::Listen);
    assert_eq!(error.error.code, ErrorCode::Conflict);
    running.stop().await;
}
