//! The temporary pool: a sparse image in a directory, with XFS on a loop device, mounted in the
//! directory.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::calls::NODE;
use super::thin_pool::ThinPool;
use super::{Failed, Result};
use crate::backend::file::{IMAGE, mapped_above};
use crate::error::{HostError, chain};
use crate::host::linux::LinuxHost;
use crate::host::{
    Device, Done, Effect, FileId, Host, LoopSpec, LoopStatus, Mount, MountSpec, attach_loop,
};
use crate::model::size::{GIB, HumanBytes, MIB};
use crate::model::{FsType, ThinPoolName};

/// Sparse: only what the volumes contain is ever written.
const POOL_BYTES: u64 = 6 * GIB;
/// The space that this needs, including the metadata of the file systems.
const NEEDED_BYTES: u64 = 512 * MIB;
/// The kernel detaches an autoclear device a moment after its last opener has closed it.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(super) struct ScratchPool {
    host: LinuxHost,
    /// The directory that contains everything.
    pub(super) folder: PathBuf,
    image: Option<FileId>,
    /// st_dev of files on the pool.
    device: Option<u64>,
    /// The thin pool that is used instead of the image.
    thin: Option<ThinPool>,
}

impl ScratchPool {
    /// Chooses a directory; nothing is created yet.
    pub(super) fn new(base: &Path, thin: Option<&ThinPoolName>) -> Result<ScratchPool> {
        let host = LinuxHost::new(vec![base.to_path_buf()]);
        let space = host
            .space(base)
            .map_err(|error| Failed::of("check the free space", &error))?;
        if thin.is_none() && space.available < NEEDED_BYTES {
            return Err(Failed::new(
                "check the free space",
                format!(
                    "{} has {} available, but {} are needed; give another directory with --dir",
                    base.display(),
                    HumanBytes(space.available),
                    HumanBytes(NEEDED_BYTES)
                ),
            ));
        }
        let id = host.random_uuid().simple().to_string();
        Ok(ScratchPool {
            folder: base.join(format!("slackwater-demo-{}", &id[..8])),
            host,
            image: None,
            device: None,
            thin: thin.map(ThinPool::new).transpose()?,
        })
    }

    /// How the pool is set up.
    pub(super) fn how(&self) -> &'static str {
        match self.thin {
            Some(_) => "check that the thin pool was never used",
            None => "create, format and mount an image",
        }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("csi").join("csi.sock")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.folder.join("driver.log")
    }

    /// Stands for the kubelet's directory.
    pub(super) fn callers(&self) -> PathBuf {
        self.folder.join("kubelet")
    }

    /// The directory in which the demo's writers and its hook communicate.
    pub(super) fn marker_dir(&self) -> PathBuf {
        self.folder.join("marker_dir")
    }

    fn node_record(&self) -> PathBuf {
        self.folder.join("node.json")
    }

    fn config(&self) -> PathBuf {
        self.folder.join("config.toml")
    }

    /// One hook, as an administrator would configure it.
    fn config_text(&self) -> Result<String> {
        let program = std::env::current_exe()
            .map_err(|error| Failed::of("find the program's own path", &error))?;
        let (program, marker_dir) = (
            program.display().to_string(),
            self.marker_dir().display().to_string(),
        );
        Ok(format!(
            "[[hook]]\nname = \"demo\"\ncommand = [{program:?}, \"demo-hook\", {marker_dir:?}, \"{{seconds}}\"]\nuser = \"root\"\nvolume = \"*\"\ntimeout = \"10s\"\n"
        ))
    }

    fn pool(&self) -> PathBuf {
        self.folder.join("pool")
    }

    fn image_path(&self) -> PathBuf {
        self.folder.join("pool.img")
    }

    /// The arguments with which the driver is started on the pool.
    pub(super) fn serve_arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["serve".into()];
        let mut add = |flag: &str, prefix: &str, value: &Path, suffix: &str| {
            let mut text = OsString::from(prefix);
            text.push(value);
            text.push(suffix);
            arguments.extend([flag.into(), text]);
        };
        add("--endpoint", "unix://", &self.socket(), "");
        add("--node-name", "", Path::new(NODE), "");
        match &self.thin {
            Some(thin) => add("--pool", "", Path::new(&thin.definition()), ""),
            None => add("--pool", "demo=file:", &self.pool(), ",init"),
        }
        add("--allowed-path", "", &self.callers(), "");
        add("--node-record", "", &self.node_record(), "");
        add("--config", "", &self.config(), "");
        add("--state-dir", "", &self.folder.join("state"), "");
        arguments
    }

    /// Creates the pool. [`ScratchPool::tear_down`] removes what was created before an error.
    pub(super) fn set_up(&mut self) -> Result<String> {
        let (image, pool) = (self.image_path(), self.pool());
        let failed = |error: HostError| Failed::of("create the pool", &error);
        for path in [&self.folder, &self.callers(), &self.marker_dir(), &pool] {
            self.act(&Effect::MakeDir { path }).map_err(failed)?;
        }
        let config = self.config_text()?;
        self.act(&Effect::WriteFile {
            path: &self.config(),
            bytes: config.as_bytes(),
        })
        .map_err(failed)?;
        if let Some(thin) = &mut self.thin {
            return thin.take(&self.host);
        }
        self.act(&Effect::Allocate {
            path: &image,
            size: POOL_BYTES,
            reserve: false,
        })
        .map_err(failed)?;
        let stat = self.host.stat(&image).map_err(failed)?;
        let backing = stat
            .ok_or_else(|| Failed::new("create the pool", "the image has disappeared"))?
            .id;
        self.image = Some(backing);
        let spec = LoopSpec {
            image: &image,
            backing,
            block_size: self.host.backing_fs(&self.folder).map_err(failed)?.sector,
            autoclear: true,
            read_only: false,
        };
        let hold = attach_loop(&self.host, spec).map_err(failed)?;
        let device = hold.device();
        self.act(&Effect::Format {
            device: &device,
            fs: FsType::Xfs,
            uuid: self.host.random_uuid(),
            options: &[],
            keep_blocks: false,
        })
        .map_err(failed)?;
        self.mount(&device, &pool).map_err(failed)?;
        self.device = Some(device.rdev);
        // The mount keeps the loop device from here on.
        drop(hold);
        Ok(format!(
            "{} of xfs on {}",
            HumanBytes(POOL_BYTES),
            device.path.display()
        ))
    }

    fn mount(&self, device: &Device, target: &Path) -> Result<Done, HostError> {
        self.act(&Effect::Mount(MountSpec {
            device,
            target,
            fs: FsType::Xfs,
            options: &[],
            read_only: false,
        }))
    }

    fn act(&self, effect: &Effect<'_>) -> Result<Done, HostError> {
        self.host.perform(effect)
    }

    /// Mounts in the directory, in the order in which they were made.
    pub(super) fn mounts(&self) -> Vec<Mount> {
        let mut mounts = self.host.mounts().unwrap_or_default();
        mounts.retain(|mount| mount.mount_point.starts_with(&self.folder));
        mounts
    }

    /// Loop devices on the pool's image, and on images in the pool.
    pub(super) fn loops(&self) -> Vec<LoopStatus> {
        let mut loops = self.host.loops().unwrap_or_default();
        loops.retain(|status| {
            Some(status.backing) == self.image || Some(status.backing.device) == self.device
        });
        loops
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the demo's own directory, with no mount in it"
    )]
    fn remove_folder(&self) {
        // Never deletes inside a file system that is still mounted there.
        if self.mounts().is_empty()
            && let Err(error) = std::fs::remove_dir_all(&self.folder)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::debug!(error = %chain(&error), "failed to remove the directory of the demo");
        }
    }

    /// Removes everything in a suitable order, and repeats that while the kernel keeps something
    /// busy. [`super::leak_check`] reports what is still left.
    pub(super) fn tear_down(&self) {
        let begun = Instant::now();
        loop {
            for mount in self.mounts().iter().rev() {
                let target = &mount.mount_point;
                // The pool comes last: the devices of volumes keep it busy.
                if *target == self.pool() {
                    self.detach_volumes();
                }
                let _ = self.act(&Effect::Unmount { target });
            }
            if self.mounts().is_empty() && self.loops().is_empty() {
                break;
            }
            if begun.elapsed() > DETACH_TIMEOUT {
                self.detach(|_| true);
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        if let Some(thin) = &self.thin {
            thin.give_back(&self.host, &self.node_record());
        }
        self.remove_folder();
    }

    /// What of the demo is still in the thin pool.
    pub(super) fn thin_leaks(&self) -> Vec<String> {
        let thin = self.thin.as_ref();
        thin.map(|thin| thin.leaks(&self.host)).unwrap_or_default()
    }

    /// The devices of raw block volumes are not detached when they are closed, and the mapped device
    /// above one keeps it attached.
    fn detach_volumes(&self) {
        let is_below = |image: &Path| image.ends_with(IMAGE) && image.starts_with(self.pool());
        for found in self.host.loop_devices(&is_below).unwrap_or_default() {
            if let Some(uuid) = mapped_above(&found.image) {
                let _ = self.act(&Effect::RemoveMapped { uuid: &uuid });
            }
        }
        self.detach(|status| Some(status.backing) != self.image);
    }

    fn detach(&self, which: impl Fn(&LoopStatus) -> bool) {
        for status in self.loops().iter().filter(|status| which(status)) {
            let _ = self.act(&Effect::DetachLoop {
                number: status.number,
                backing: status.backing,
            });
        }
    }
}
