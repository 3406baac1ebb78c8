//! A cluster to test and measure caches on: real processes, known data at home, readers that look
//! at every byte. Asserts nothing.

use anyhow::{Context, Result, ensure};
use bafs_proto::message::{JobOutcome, JobReport, MountTarget};

use crate::World;
use crate::api::{Api, CacheVolume, CacheWish, Speaker};
use crate::content::Content;

/// Name of the data file in its directory.
pub const FILE: &str = "set.bin";

/// A cluster with its speaker.
#[derive(Debug)]
pub struct Stage {
    /// The processes.
    pub world: World,
    /// Speaks to them.
    pub api: Api,
    nodes: usize,
}

impl Stage {
    /// Starts so many nodes of a size, and a home behind a link of the given rate.
    ///
    /// # Errors
    /// A process that does not start.
    pub fn start(nodes: usize, size: &str, limit: Option<&str>) -> Result<Self> {
        let world = World::start_with(&vec![size; nodes], limit)?;
        world.wait_for_servers(nodes + 1)?;
        let api = Api::new(&world.cluster.identity())?;
        Ok(Self { world, api, nodes })
    }

    /// Puts a directory with one data file at home.
    ///
    /// # Errors
    /// An I/O error.
    pub fn put(&self, directory: &str, content: &Content) -> Result<()> {
        let path = self.world.home.path().join(directory);
        std::fs::create_dir_all(&path)?;
        content.write(&path.join(FILE))
    }

    /// Addresses of the nodes.
    pub fn nodes(&self) -> Vec<String> {
        let name = |n: usize| self.world.cluster.address(&format!("n{n}")).to_owned();
        (1..=self.nodes).map(name).collect()
    }

    /// A cache volume on each of these nodes, made at once.
    ///
    /// # Errors
    /// What a node answers.
    pub fn caches(&self, nodes: &[String], wish: &CacheWish) -> Result<Vec<CacheVolume>> {
        let home = self.world.cluster.home().to_owned();
        self.api.all(nodes.iter().cloned().map(|node| {
            let (speaker, home, wish) = (self.api.speaker().clone(), home.clone(), wish.clone());
            async move { speaker.create(&node, &home, &wish).await }
        }))
    }

    /// Deletes volumes.
    ///
    /// # Errors
    /// What a node answers.
    pub fn delete(&self, volumes: &[CacheVolume]) -> Result<()> {
        volumes
            .iter()
            .try_for_each(|volume| self.api.wait(self.api.speaker().delete(volume)))
    }

    /// Bytes of files that home has sent so far.
    ///
    /// # Errors
    /// Home does not answer.
    pub fn home_bytes(&self) -> Result<u64> {
        let home = self.world.cluster.home();
        let counters = self.api.wait(self.api.speaker().counters(home))?;
        Ok(counters.get("home_read_bytes").copied().unwrap_or(0))
    }

    /// A counter, summed over these nodes.
    ///
    /// # Errors
    /// A node does not answer.
    pub fn sum(&self, nodes: &[String], counter: &str) -> Result<u64> {
        let mut sum = 0;
        for node in nodes {
            let counters = self.api.wait(self.api.speaker().counters(node))?;
            sum += counters.get(counter).copied().unwrap_or(0);
        }
        Ok(sum)
    }

    /// A reader with connections of its own.
    ///
    /// # Errors
    /// No socket.
    pub fn reader(&self) -> Result<Speaker> {
        let identity = self.world.cluster.identity();
        self.api.wait(async { Speaker::new(&identity) })
    }

    /// Reads a cache volume once from its first byte to its last, and compares it with `content`.
    ///
    /// # Errors
    /// Wrong bytes, or what the node answers.
    pub fn check_scan(&self, volume: &CacheVolume, content: &Content) -> Result<()> {
        let scan = scan(self.reader()?, volume.clone(), content);
        let wrong = self.api.wait(scan)?;
        ensure!(wrong == 0, "{wrong} bytes are wrong");
        Ok(())
    }

    /// The script of a job that compares its data file with the one at home, by an unmodified
    /// program, and prints how many bytes differ.
    pub fn compare_script(&self, directory: &str) -> String {
        let original = self.world.home.path().join(directory).join(FILE);
        let original = original.display();
        format!(
            "test \"$(stat -c %s /data/{FILE})\" = \"$(stat -c %s {original})\" || exit 3; \
             cmp -s /data/{FILE} {original} && echo 0 && exit 0; \
             cmp -l /data/{FILE} {original} | wc -l"
        )
    }
}

/// Reads all of a volume by the volume API, and counts the bytes that are not the content's.
///
/// # Errors
/// What the node answers.
pub async fn scan(speaker: Speaker, volume: CacheVolume, expected: &Content) -> Result<u64> {
    let mut wrong = 0;
    let count = |_: &str, offset, found: &[u8]| wrong += expected.wrong_bytes(offset, found);
    let read = speaker.scan(&volume, count).await?;
    Ok(wrong + read.abs_diff(expected.bytes().len() as u64))
}

/// Runs a job of [`Stage::compare_script`], and returns its number of wrong bytes.
///
/// # Errors
/// What the node answers; a job that ends in another way.
pub async fn compare(
    speaker: Speaker,
    node: String,
    target: MountTarget,
    script: String,
) -> Result<u64> {
    let execution = speaker.start_job(&node, target, &script).await?;
    let report = speaker.wait_job(&node, execution).await?;
    wrong_bytes_of(&report)
}

fn wrong_bytes_of(report: &JobReport) -> Result<u64> {
    let said = report.output_tail.trim();
    ensure!(
        report.outcome == JobOutcome::Exited(0),
        "{:?}: {said}",
        report.outcome
    );
    said.parse().with_context(|| format!("a job said: {said}"))
}
