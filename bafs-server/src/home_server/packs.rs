//! Small files that come home with one call. First all are staged and made durable beside each
//! other, then one transaction decides them, then they get their names.

use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{PutFile, PutReceipt};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use futures_util::future::join_all;
use tokio::sync::OwnedSemaphorePermit;

use super::pack_limits::PACKS_MAX;
use super::upload::{Content, FileIdentity, StagedData, UploadEvent, UploadRecord, UploadState};
use super::upload_fences::FencedTarget;
use super::upload_files::{StagedFile, check_target_path};
use super::uploads::{Uploads, check_digest};

/// Whether a caller may write at a path: the one that it gave, and the one where links in the
/// export lead.
pub(crate) type Allow = Box<dyn Fn(&str) -> Result<()> + Send + Sync>;

/// A small file that came.
pub(crate) struct SmallFile {
    pub(crate) call: PutFile,
    pub(crate) data: Bytes,
    pub(crate) allow: Allow,
}

/// How far a small file came by itself.
enum PackStage {
    /// It was decided before.
    Decided(SmallFile, UploadRecord),
    Staged(StagedSmallFile),
}

/// A small file whose bytes are on the disk.
struct StagedSmallFile {
    small: SmallFile,
    file: StagedFile,
    data: StagedData,
    target: FencedTarget,
}

impl Uploads {
    /// Puts small files in place at once, each for itself. An upload that was begun in ranges is
    /// finished so, and one that is done stays as it is. It runs to its end even if the caller
    /// gives up.
    ///
    /// # Errors
    /// `Busy` when others are in the way until the deadline. Of each file: what `allow` answers;
    /// `BadPath`; `DigestMismatch`; `Conflict` when the id was used for another path or content;
    /// `UploadFenced` when a later upload was put there.
    pub(crate) async fn put(
        self: &Arc<Self>,
        files: Vec<SmallFile>,
        deadline: Deadline,
    ) -> Result<Vec<Result<PutReceipt>>> {
        let place = self.wait_for_place(deadline).await?;
        let uploads = Arc::clone(self);
        let pack = tokio::spawn(async move {
            let _place = place;
            uploads.put_pack(files).await
        });
        pack.await.map_err(|error| failed(&error))?
    }

    async fn wait_for_place(&self, deadline: Deadline) -> Result<OwnedSemaphorePermit> {
        let place = self.limits.packs.clone().acquire_owned();
        let until = deadline.with_reply_margin().instant();
        match tokio::time::timeout_at(until.into(), place).await {
            Ok(place) => place.map_err(|error| failed(&error)),
            Err(_) => {
                let text = format!("{PACKS_MAX} calls with files were ahead all the time");
                Err(Error::new(ErrorCode::Busy, text))
            }
        }
    }

    async fn put_pack(self: Arc<Self>, files: Vec<SmallFile>) -> Result<Vec<Result<PutReceipt>>> {
        self.clone().blocking(Self::occupy).await?;
        let staged = self.each(files, Self::stage).await;
        // The names beside the contents: the disk takes them together.
        let names = self.clone().blocking(|uploads| uploads.files.sync_names());
        let contents = self.each(staged, |_, stage: Result<PackStage>| stage?.seal());
        let (names, staged) = tokio::join!(names, contents);
        let staged = staged.into_iter().map(|stage| match (stage, &names) {
            (Ok(PackStage::Staged(_)), Err(error)) => Err(error.clone()),
            (stage, _) => stage,
        });
        let staged = staged.collect();
        self.blocking(|uploads| Ok(uploads.place_all(staged))).await
    }

    /// Does the same with each, as many at once as may be, in their order.
    async fn each<T: Send + 'static, U: Send + 'static>(
        self: &Arc<Self>,
        all: Vec<T>,
        act: impl Fn(&Self, T) -> Result<U> + Clone + Send + 'static,
    ) -> Vec<Result<U>> {
        let acting = all.into_iter().map(|one| {
            let (uploads, act) = (Arc::clone(self), act.clone());
            async move {
                let taken = self.limits.files.acquire().await;
                let _taken = taken.map_err(|error| failed(&error))?;
                uploads.blocking(move |uploads| act(uploads, one)).await
            }
        });
        join_all(acting).await
    }

    /// Runs something that waits for the disk, if the exported directory is in its place.
    async fn blocking<T: Send + 'static>(
        self: Arc<Self>,
        act: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let act = move || self.files.export.check_in_place().and_then(|()| act(&self));
        let done = tokio::task::spawn_blocking(act).await;
        done.map_err(|error| failed(&error))?
    }

    /// Writes a file to the disk, if it is wanted and may have its name.
    fn stage(&self, small: SmallFile) -> Result<PackStage> {
        let SmallFile { call, data, allow } = &small;
        check_target_path(&call.path)?;
        allow(&call.path)?;
        check_digest(&call.path, data, call.digest)?;
        let place = match self.files.check_target(&call.path, allow) {
            Ok(place) => place,
            Err(error) => {
                // Whatever is there now, one that was decided before stays so.
                let known = self.load(call.extraction)?;
                let known = known.filter(|known| !known.is_receiving()).ok_or(error)?;
                known.check_path(call.extraction, &call.path)?;
                known.check_content(call.extraction, small.content())?;
                return Ok(PackStage::Decided(small, known));
            }
        };
        let fence = call.fence;
        let name = format!("{:032x}", rand::random::<u128>());
        let file = StagedFile::write(self.files.data_path(&name), data)?;
        let identity = FileIdentity::default();
        let data = StagedData { name, identity };
        Ok(PackStage::Staged(StagedSmallFile {
            small,
            file,
            data,
            target: FencedTarget { place, fence },
        }))
    }

    /// Decides all files of a pack that are staged, and gives all their names.
    fn place_all(&self, staged: Vec<Result<PackStage>>) -> Vec<Result<PutReceipt>> {
        let events = staged.iter().flatten().filter_map(PackStage::event);
        let events: Vec<_> = events.collect();
        let decided = match events.is_empty() {
            true => Ok(Vec::new()),
            false => self.table.run(move |rows| {
                let stage = |(id, event, target)| rows.stage(id, event, &target);
                Ok(events.into_iter().map(stage).collect::<Vec<_>>())
            }),
        };
        let mut decided = match decided {
            Ok(decided) => decided.into_iter(),
            Err(error) => return self.undecided(staged, &error),
        };
        let stages = staged.into_iter().map(|stage| match stage? {
            PackStage::Decided(small, record) => Ok((small, record)),
            PackStage::Staged(staged) => {
                let record = decided.next().expect("one for each staged file");
                self.drop_fenced(staged.small.call.extraction, &record);
                self.keep(staged, record?)
            }
        });
        let stages: Vec<Result<_>> = stages.collect();
        let places = stages.iter().flatten();
        let places = places.map(|(small, record): &(SmallFile, UploadRecord)| {
            let allow: super::upload_files::AllowPath<'_> = &*small.allow;
            (small.call.extraction, record.clone(), allow)
        });
        let mut placed = self.publish_all(places.collect()).into_iter();
        let told = stages.iter().map(|stage| match stage {
            Ok(_) => placed.next().expect("one for each decided file"),
            Err(error) => Err(error.clone()),
        });
        told.collect()
    }

    /// Keeps a staged file if its row names it. What arrived of it in ranges is not needed then.
    fn keep(
        &self,
        mut staged: StagedSmallFile,
        record: UploadRecord,
    ) -> Result<(SmallFile, UploadRecord)> {
        staged.file.is_kept = staged.is_named_by(&record);
        if staged.file.is_kept {
            let extract = staged.small.call.extraction;
            let name = extract.to_string();
            self.arrivals.locked(extract, |slot| {
                *slot = None;
                let _ = std::fs::remove_file(self.files.data_path(&name));
                Ok(())
            })?;
        }
        Ok((staged.small, record))
    }

    /// The disk took no decision. Where a later start may find one all the same, it must find the
    /// file, too.
    fn undecided(&self, staged: Vec<Result<PackStage>>, error: &Error) -> Vec<Result<PutReceipt>> {
        let refuse = |stage| {
            if let PackStage::Staged(mut staged) = stage? {
                let known = self.load(staged.small.call.extraction);
                staged.file.is_kept = match known {
                    Ok(known) => known.is_some_and(|known| staged.is_named_by(&known)),
                    Err(_) => true,
                };
            }
            Err(error.clone())
        };
        staged.into_iter().map(refuse).collect()
    }
}

impl SmallFile {
    fn content(&self) -> Content {
        let (size, digest): (_, Digest) = (self.data.len() as u64, self.call.digest);
        Content { size, digest }
    }
}

impl StagedSmallFile {
    fn is_named_by(&self, record: &UploadRecord) -> bool {
        matches!(&record.state, UploadState::Durable { data, .. } if data.name == self.data.name)
    }
}

impl PackStage {
    /// The same, with the content on disk.
    fn seal(self) -> Result<Self> {
        match self {
            Self::Staged(mut staged) => {
                staged.data.identity = staged.file.seal(staged.small.call.mode)?;
                Ok(Self::Staged(staged))
            }
            Self::Decided(..) => Ok(self),
        }
    }

    fn event(&self) -> Option<(ExtractionId, UploadEvent, FencedTarget)> {
        let Self::Staged(StagedSmallFile {
            small,
            data,
            target,
            ..
        }) = self
        else {
            return None;
        };
        let event = UploadEvent::Staged {
            path: small.call.path.clone(),
            mode: small.call.mode,
            content: small.content(),
            data: data.clone(),
        };
        Some((small.call.extraction, event, target.clone()))
    }
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorCode::ServerFault,
        format!("the home server failed: {error}"),
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use bafs_proto::message::{BeginPut, CommitPut};
    use bafs_proto::token::Token;

    use super::super::export::{Export, OWN_DIRECTORY};
    use super::super::pack_limits::FILES_MAX;
    use super::super::upload_table::TableFault;
    use super::*;

    fn open(root: &Path) -> Arc<Uploads> {
        let export = Arc::new(Export::open(root).expect("export"));
        Arc::new(Uploads::open(export).expect("uploads"))
    }

    fn small(number: u128, path: &str, data: &'static [u8]) -> SmallFile {
        SmallFile {
            call: PutFile {
                extraction: ExtractionId(number),
                path: path.to_owned(),
                mode: 0o640,
                size: data.len() as u32,
                digest: Digest::of(data),
                token: Token::none(),
                fence: None,
            },
            data: Bytes::from_static(data),
            // As for a token that is good for `out`.
            allow: Box::new(|place| match place.starts_with("out") {
                true => Ok(()),
                false => Err(Error::new(ErrorCode::RightMissing, "elsewhere")),
            }),
        }
    }

    fn begin(number: u128, path: &str) -> BeginPut {
        BeginPut {
            extraction: ExtractionId(number),
            path: path.to_owned(),
            mode: 0o640,
            fence: None,
        }
    }

    async fn put(uploads: &Arc<Uploads>, files: Vec<SmallFile>) -> Vec<Result<PutReceipt>> {
        let told = uploads.put(files, Deadline::after_ms(20_000)).await;
        told.expect("an answer")
    }

    async fn put_one(uploads: &Arc<Uploads>, small: SmallFile) -> Result<PutReceipt> {
        put(uploads, vec![small]).await.remove(0)
    }

    fn row(uploads: &Uploads, number: u128) -> Option<UploadRecord> {
        uploads.load(ExtractionId(number)).expect("read")
    }

    fn set_fault(uploads: &Uploads, fault: TableFault) {
        *uploads.table.fault.lock().expect("lock") = fault;
    }

    /// Does the first steps, as if the server was killed before it did or undid anything else.
    fn staged(uploads: &Uploads, small: SmallFile) -> StagedSmallFile {
        let staged = uploads.stage(small).and_then(PackStage::seal);
        let Ok(PackStage::Staged(mut staged)) = staged else {
            panic!("it was not staged");
        };
        staged.file.is_kept = true;
        staged
    }

    fn decided(uploads: &Uploads, small: SmallFile) -> (ExtractionId, UploadRecord) {
        let staged = PackStage::Staged(staged(uploads, small));
        let (id, event, target) = staged.event().expect("it is staged");
        let record = uploads
            .table
            .run(move |rows| rows.stage(id, event, &target));
        (id, record.expect("decided"))
    }

    /// Removes the bytes of a decided upload.
    fn lose(uploads: &Uploads, (_, record): &(ExtractionId, UploadRecord)) {
        let UploadState::Durable { data, .. } = &record.state else {
            panic!("{record:?}");
        };
        fs::remove_file(uploads.files.data_path(&data.name)).expect("remove");
    }

    fn receipt((id, record): &(ExtractionId, UploadRecord)) -> PutReceipt {
        record.receipt(*id).expect("it is decided")
    }

    fn temporaries(root: &Path) -> usize {
        let found = fs::read_dir(root.join(OWN_DIRECTORY).join("data")).expect("list");
        found.count()
    }

    fn read(root: &Path, path: &str) -> Option<Vec<u8>> {
        fs::read(root.join(path)).ok()
    }

    fn code<T: std::fmt::Debug>(told: Result<T>) -> ErrorCode {
        told.expect_err("must be refused").code
    }

    #[tokio::test]
    async fn a_restart_removes_temporaries_without_a_record() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        staged(&uploads, small(1, "out/f", b"one"));
        assert_eq!(temporaries(root.path()), 1);
        drop(uploads);
        let uploads = open(root.path());
        assert_eq!(temporaries(root.path()), 0);
        assert_eq!(read(root.path(), "out/f"), None);
        let again = small(1, "out/f", b"two");
        put_one(&uploads, again).await.expect("nothing was decided");
        assert_eq!(read(root.path(), "out/f").expect("read"), b"two");
        assert_eq!(temporaries(root.path()), 0);
    }

    #[tokio::test]
    async fn a_restart_places_recorded_files_exactly_once() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        decided(&uploads, small(1, "out/f", b"first"));
        let record = decided(&uploads, small(2, "out/f", b"second"));
        let named = decided(&uploads, small(3, "out/g", b"named"));
        let allow = |_: &str| Ok(());
        for _ in 0..2 {
            let done = uploads.rename(named.0, &named.1, &allow, &mut None);
            done.expect("it is given once, whoever comes second");
        }
        fs::write(root.path().join("out/g"), b"used since").expect("write");
        drop(uploads);
        let uploads = open(root.path());
        assert_eq!(read(root.path(), "out/f").expect("read"), b"second");
        assert_eq!(temporaries(root.path()), 0);
        fs::remove_file(root.path().join("out/f")).expect("remove");
        let again = put_one(&uploads, small(2, "out/f", b"second")).await;
        assert_eq!(again, Ok(receipt(&record)));
        assert_eq!(read(root.path(), "out/f"), None, "it was there once");
        let again = put_one(&uploads, small(3, "out/g", b"named")).await;
        assert_eq!(again, Ok(receipt(&named)));
        assert_eq!(read(root.path(), "out/g").expect("read"), b"used since");
    }

    #[tokio::test]
    async fn a_recorded_file_without_bytes_is_requested_again() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let lost = decided(&uploads, small(1, "out/f", b"one"));
        lose(&uploads, &lost);
        drop(uploads);
        let uploads = open(root.path());
        let told = put_one(&uploads, small(1, "out/f", b"one")).await;
        assert_eq!(told, Ok(receipt(&lost)));
        assert_eq!(read(root.path(), "out/f").expect("read"), b"one");
    }

    #[tokio::test]
    async fn a_repeated_put_places_the_recorded_file() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let record = decided(&uploads, small(1, "out/d/f", b"one"));
        // It is for the same place and content, or it is another one.
        let elsewhere = put_one(&uploads, small(1, "out/d/g", b"one")).await;
        assert_eq!(code(elsewhere), ErrorCode::Conflict);
        fs::remove_dir(root.path().join("out/d")).expect("rmdir");
        let told = put_one(&uploads, small(1, "out/d/f", b"one")).await;
        assert_eq!(told, Ok(receipt(&record)));
        assert_eq!(read(root.path(), "out/d/f").expect("read"), b"one");
        let other = put_one(&uploads, small(1, "out/d/f", b"two")).await;
        assert_eq!(code(other), ErrorCode::Conflict);
        // As a large file, too.
        let begun = uploads
            .begin(&begin(1, "out/d/f"), |_| Ok(()))
            .expect("begin");
        assert_eq!(begun.receipt, Some(receipt(&record)));
        // And if its bytes are gone by somebody's hand, they are taken again.
        let lost = decided(&uploads, small(2, "out/h", b"one"));
        lose(&uploads, &lost);
        let told = put_one(&uploads, small(2, "out/h", b"one")).await;
        assert!(told.expect_err("gone").is_transient());
        put_one(&uploads, small(2, "out/h", b"one"))
            .await
            .expect("put");
        assert_eq!(read(root.path(), "out/h").expect("read"), b"one");
    }

    #[tokio::test]
    async fn concurrent_copies_of_a_pack_are_stored_once() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let pack = || -> Vec<_> {
            let files = (1..=20).map(|n| small(n, &format!("out/{}/f{n}", n % 3), b"data"));
            // The last is in it twice.
            files.chain([small(20, "out/2/f20", b"data")]).collect()
        };
        let (one, two) = tokio::join!(put(&uploads, pack()), put(&uploads, pack()));
        assert!(one.iter().all(Result::is_ok), "{one:?}");
        assert_eq!(one, two);
        assert_eq!(one[19], one[20]);
        assert_eq!(temporaries(root.path()), 0);
    }

    /// Nobody waits for that.
    #[tokio::test]
    async fn published_small_files_are_noted_in_a_pause() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        put_one(&uploads, small(1, "out/f", b"one"))
            .await
            .expect("put");
        for _ in 0..200 {
            let record = row(&uploads, 1).expect("it is known");
            if matches!(record.state, UploadState::Published(_)) {
                assert!(uploads.table.publications().is_empty());
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        panic!("the table does not say that it is published");
    }

    #[tokio::test]
    async fn refused_files_do_not_affect_their_pack() {
        let root = tempfile::tempdir().expect("directory");
        fs::create_dir_all(root.path().join("out/directory")).expect("mkdir");
        fs::create_dir(root.path().join("secret")).expect("mkdir");
        symlink("../secret", root.path().join("out/way")).expect("link");
        symlink("..", root.path().join("out/up")).expect("link");
        let uploads = open(root.path());
        let mut wrong = small(5, "out/wrong", b"x");
        wrong.call.digest = Digest::of(b"y");
        let told = put(
            &uploads,
            vec![
                small(1, "out/directory", b"x"),
                small(2, "out/way/f", b"x"),
                small(3, "elsewhere", b"x"),
                small(4, &format!("out/up/{OWN_DIRECTORY}"), b"x"),
                wrong,
                small(6, "out/fine", b"x"),
                small(7, "out/way/deep/f", b"x"),
            ],
        );
        let told: Vec<_> = told
            .await
            .into_iter()
            .map(|it| it.map_err(|e| e.code))
            .collect();
        let codes = told.iter().map(|it| it.as_ref().err().copied());
        use ErrorCode::*;
        let refused = [
            WrongState,
            RightMissing,
            RightMissing,
            RightMissing,
            DigestMismatch,
        ];
        let mut expected: Vec<_> = refused.into_iter().map(Some).collect();
        expected.extend([None, Some(RightMissing)]);
        assert_eq!(codes.collect::<Vec<_>>(), expected);
        for number in [1, 2, 3, 4, 5, 7] {
            assert_eq!(row(&uploads, number), None, "{number}");
        }
        assert_eq!(temporaries(root.path()), 0);
        assert_eq!(
            fs::read_dir(root.path().join("secret"))
                .expect("list")
                .count(),
            0
        );
    }

    #[tokio::test]
    async fn a_later_link_is_followed_only_with_rights() {
        let root = tempfile::tempdir().expect("directory");
        fs::create_dir(root.path().join("secret")).expect("mkdir");
        let uploads = open(root.path());
        decided(&uploads, small(1, "out/d/f", b"one"));
        drop(uploads);
        fs::remove_dir(root.path().join("out/d")).expect("rmdir");
        symlink("../secret", root.path().join("out/d")).expect("link");
        let uploads = open(root.path());
        assert_eq!(read(root.path(), "secret/f"), None);
        let asked = put_one(&uploads, small(1, "out/d/f", b"one")).await;
        assert_eq!(code(asked), ErrorCode::RightMissing);
        let mut granted = small(1, "out/d/f", b"one");
        granted.allow = Box::new(|_| Ok(()));
        put_one(&uploads, granted).await.expect("put");
        assert_eq!(read(root.path(), "secret/f").expect("read"), b"one");
    }

    #[tokio::test]
    async fn a_full_disk_fails_only_the_current_pack() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let pack = || vec![small(1, "out/f", b"one"), small(2, "out/g", b"two")];
        set_fault(&uploads, TableFault::Full);
        for told in put(&uploads, pack()).await {
            assert_eq!(code(told), ErrorCode::NoSpaceBytes);
        }
        assert_eq!(
            (read(root.path(), "out/f"), temporaries(root.path())),
            (None, 0)
        );
        set_fault(&uploads, TableFault::None);
        assert!(put(&uploads, pack()).await.iter().all(Result::is_ok));
        // Where nobody knows what the disk has, the bytes stay for the next start.
        set_fault(&uploads, TableFault::Unknown);
        let told = put_one(&uploads, small(3, "out/h", b"three")).await;
        assert!(told.is_err());
        assert_eq!(temporaries(root.path()), 1);
    }

    #[tokio::test]
    async fn packs_continue_uploads_begun_by_other_calls() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        uploads
            .begin(&begin(1, "out/old"), |_| Ok(()))
            .expect("begin");
        uploads
            .write(ExtractionId(1), 0, b"old", |_| Ok(()))
            .expect("write");
        let commit = CommitPut {
            extraction: ExtractionId(1),
            size: 3,
            digest: Digest::of(b"old"),
            fence: None,
        };
        let receipt = uploads.commit(&commit, |_| Ok(())).expect("commit");
        fs::write(root.path().join("out/old"), b"used since").expect("write");
        let told = put_one(&uploads, small(1, "out/old", b"old")).await;
        assert_eq!(told, Ok(receipt));
        let other = put_one(&uploads, small(1, "out/old", b"new")).await;
        assert_eq!(code(other), ErrorCode::Conflict);
        assert_eq!(read(root.path(), "out/old").expect("read"), b"used since");
        uploads
            .begin(&begin(2, "out/new"), |_| Ok(()))
            .expect("begin");
        uploads
            .write(ExtractionId(2), 0, b"half", |_| Ok(()))
            .expect("write");
        put_one(&uploads, small(2, "out/new", b"whole"))
            .await
            .expect("put");
        assert_eq!(read(root.path(), "out/new").expect("read"), b"whole");
        assert_eq!(temporaries(root.path()), 0, "what came before is gone");
    }

    #[test]
    fn a_chunked_upload_begun_meanwhile_is_completed() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let under_way = staged(&uploads, small(1, "out/f", b"one"));
        uploads
            .begin(&begin(1, "out/f"), |_| Ok(()))
            .expect("begin");
        let told = uploads.place_all(vec![Ok(PackStage::Staged(under_way))]);
        assert!(told[0].is_ok(), "{told:?}");
        let state = uploads.begin(&begin(1, "out/f"), |_| Ok(()));
        assert!(
            state.expect("begin").receipt.is_some(),
            "it knows of its end"
        );
        assert_eq!(read(root.path(), "out/f").expect("read"), b"one");
        assert_eq!(temporaries(root.path()), 0);
    }

    #[tokio::test]
    async fn two_homes_share_one_directory_safely() {
        let root = tempfile::tempdir().expect("directory");
        let (one, two) = (open(root.path()), open(root.path()));
        let under_way = staged(&one, small(1, "out/f", b"one"));
        put_one(&two, small(2, "out/g", b"two")).await.expect("put");
        assert_eq!(temporaries(root.path()), 1, "it is the other's");
        drop(open(root.path()));
        assert_eq!(temporaries(root.path()), 1, "a third one leaves it, too");
        let under_way = vec![Ok(PackStage::Staged(under_way))];
        let done = one.place_all(under_way).remove(0).expect("put");
        fs::write(root.path().join("out/f"), b"used since").expect("write");
        let told = put_one(&two, small(1, "out/f", b"one")).await;
        assert_eq!(told, Ok(done), "the table is of both");
        assert_eq!(read(root.path(), "out/f").expect("read"), b"used since");
    }

    #[tokio::test]
    async fn removing_the_table_loses_receipts_but_no_files() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        put_one(&uploads, small(1, "out/f", b"one"))
            .await
            .expect("put");
        fs::remove_dir_all(root.path().join(OWN_DIRECTORY)).expect("remove");
        put_one(&uploads, small(2, "out/g", b"two"))
            .await
            .expect("put");
        drop(uploads);
        let uploads = open(root.path());
        let is_known = |number| row(&uploads, number).is_some();
        assert_eq!((is_known(1), is_known(2)), (false, true));
    }

    #[tokio::test]
    async fn a_put_behind_too_many_gets_busy() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let all = uploads
            .limits
            .packs
            .clone()
            .acquire_many_owned(PACKS_MAX as u32);
        let all = all.await.expect("permits");
        let late = uploads.put(vec![small(1, "out/f", b"one")], Deadline::after_ms(0));
        assert_eq!(code(late.await), ErrorCode::Busy);
        let files = uploads.limits.files.acquire_many(FILES_MAX as u32 - 1);
        let files = files.await.expect("permits");
        drop(all);
        // One after the other, but all of them.
        let pack = (1..=9).map(|number| small(number, &format!("out/{number}"), b"x"));
        assert!(
            put(&uploads, pack.collect())
                .await
                .iter()
                .all(Result::is_ok)
        );
        drop(files);
        assert_eq!(uploads.limits.packs.available_permits(), PACKS_MAX);
    }
}
