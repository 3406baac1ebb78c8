//! A cluster to test and measure caches on: real processes, known data at home, readers that look
//! at every byte. Asserts nothing.

use anyhow::{Context, Result, ensure};
use bafs_proto::message::{JobOutcome, JobReport, MountTarget};

use crate::TestCluster;
use crate::api::{ApiClient, BlockingClient, CacheSpec, CacheVolume};
use crate::content::Content;

/// Name of the data file in its directory.
pub const DATA_FILE: &str = "set.bin";

/// A cluster with its speaker.
#[derive(Debug)]
pub struct CacheCluster {
    /// The processes.
    pub test_cluster: TestCluster,
    /// Speaks to them.
    pub client: BlockingClient,
    node_count: usize,
}

impl CacheCluster {
    /// Starts so many nodes of a size, and a home behind a link of the given rate.
    ///
    /// # Errors
    /// A process that does not start.
    pub fn start(nodes: usize, size: &str, limit: Option<&str>) -> Result<Self> {
        let world = TestCluster::start_with_home_rate(&vec![size; nodes], limit)?;
        world.wait_for_servers(nodes + 1)?;
        let api = BlockingClient::new(&world.cluster.identity())?;
        Ok(Self {
            test_cluster: world,
            client: api,
            node_count: nodes,
        })
    }

    /// Puts a directory with one data file at home.
    ///
    /// # Errors
    /// An I/O error.
    pub fn write_data_set(&self, directory: &str, content: &Content) -> Result<()> {
        let path = self.test_cluster.home.path().join(directory);
        std::fs::create_dir_all(&path)?;
        content.write_file(&path.join(DATA_FILE))
    }

    /// Addresses of the nodes.
    pub fn node_addresses(&self) -> Vec<String> {
        let name = |n: usize| {
            self.test_cluster
                .cluster
                .address(&format!("n{n}"))
                .to_owned()
        };
        (1..=self.node_count).map(name).collect()
    }

    /// A cache volume on each of these nodes, made at once.
    ///
    /// # Errors
    /// The node's error.
    pub fn create_caches(&self, nodes: &[String], spec: &CacheSpec) -> Result<Vec<CacheVolume>> {
        let home = self.test_cluster.cluster.home_address().to_owned();
        self.client.run_all(nodes.iter().cloned().map(|node| {
            let (api_client, home, spec) =
                (self.client.client().clone(), home.clone(), spec.clone());
            async move { api_client.create_cache(&node, &home, &spec).await }
        }))
    }

    /// Deletes volumes.
    ///
    /// # Errors
    /// The node's error.
    pub fn delete_volumes(&self, volumes: &[CacheVolume]) -> Result<()> {
        volumes.iter().try_for_each(|volume| {
            self.client
                .block_on(self.client.client().delete_volume(volume))
        })
    }

    /// Bytes of files that home has sent so far.
    ///
    /// # Errors
    /// Home does not answer.
    pub fn read_home_bytes(&self) -> Result<u64> {
        let home = self.test_cluster.cluster.home_address();
        let counters = self
            .client
            .block_on(self.client.client().read_counters(home))?;
        Ok(counters.get("home_read_bytes").copied().unwrap_or(0))
    }

    /// A counter, summed over these nodes.
    ///
    /// # Errors
    /// A node does not answer.
    pub fn sum_counter(&self, nodes: &[String], counter: &str) -> Result<u64> {
        let mut sum = 0;
        for node in nodes {
            let counters = self
                .client
                .block_on(self.client.client().read_counters(node))?;
            sum += counters.get(counter).copied().unwrap_or(0);
        }
        Ok(sum)
    }

    /// A reader with connections of its own.
    ///
    /// # Errors
    /// No socket.
    pub fn new_reader(&self) -> Result<ApiClient> {
        let identity = self.test_cluster.cluster.identity();
        self.client.block_on(async { ApiClient::new(&identity) })
    }

    /// Reads a cache volume once from its first byte to its last, and compares it with `content`.
    ///
    /// # Errors
    /// Wrong bytes, or the node's error.
    pub fn check_scan(&self, volume: &CacheVolume, content: &Content) -> Result<()> {
        let scan = count_wrong_bytes(self.new_reader()?, volume.clone(), content);
        let wrong = self.client.block_on(scan)?;
        ensure!(wrong == 0, "{wrong} bytes are wrong");
        Ok(())
    }

    /// The script of a job that compares its data file with the one at home, by an unmodified
    /// program, and prints how many bytes differ.
    pub fn compare_script(&self, directory: &str) -> String {
        let original = self
            .test_cluster
            .home
            .path()
            .join(directory)
            .join(DATA_FILE);
        let original = original.display();
        format!(
            "test \"$(stat -c %s /data/{DATA_FILE})\" = \"$(stat -c %s {original})\" || exit 3; \
             cmp -s /data/{DATA_FILE} {original} && echo 0 && exit 0; \
             cmp -l /data/{DATA_FILE} {original} | wc -l"
        )
    }
}

/// Reads all of a volume by the volume API, and counts the bytes that are not the content's.
///
/// # Errors
/// The node's error.
pub async fn count_wrong_bytes(
    api_client: ApiClient,
    volume: CacheVolume,
    expected: &Content,
) -> Result<u64> {
    let mut wrong = 0;
    let count = |_: &str, offset, found: &[u8]| wrong += expected.count_wrong_bytes(offset, found);
    let read = api_client.scan_files(&volume, count).await?;
    Ok(wrong + read.abs_diff(expected.bytes().len() as u64))
}

/// Runs a job of [`CacheCluster::compare_script`], and returns its number of wrong bytes.
///
/// # Errors
/// The node's error; a job that ends in another way.
pub async fn run_compare_job(
    api_client: ApiClient,
    node: String,
    target: MountTarget,
    script: String,
) -> Result<u64> {
    let execution = api_client.start_job(&node, target, &script).await?;
    let report = api_client.wait_for_job(&node, execution).await?;
    parse_wrong_bytes(&report)
}

fn parse_wrong_bytes(report: &JobReport) -> Result<u64> {
    let said = report.output_tail.trim();
    ensure!(
        report.outcome == JobOutcome::Exited(0),
        "{:?}: {said}",
        report.outcome
    );
    said.parse().with_context(|| format!("a job said: {said}"))
}
