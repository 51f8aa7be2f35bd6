//! A host on which effects can be blocked, so that a call runs while another one arrives.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use slackwater::host::memory::MemoryHost;
use slackwater::host::{
    BackingFs, Device, Done, Effect, Extent, FileId, FileStat, FolderMount, ForeignFile, Host,
    Kept, Known, LoopDevice, LoopHold, Mount, MountRoot, Piece, Result, Signature, Space,
};
use slackwater::model::{Alpha, FsType};
use uuid::Uuid;

use crate::service::harness::{Node, create};

/// The effects that wait, and their number.
#[derive(Default)]
struct State {
    closed: Vec<&'static str>,
    waiting: usize,
    missing: Vec<String>,
    panics: bool,
}

#[derive(Clone)]
pub struct GatedHost {
    inner: MemoryHost,
    gate: Arc<(Mutex<State>, Condvar)>,
}

/// Opens a gate at the end of a test, also after a panic.
pub struct Opens(pub GatedHost);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

impl GatedHost {
    pub fn new(inner: MemoryHost) -> GatedHost {
        GatedHost {
            inner,
            gate: Arc::default(),
        }
    }

    /// From now on, effects of this name wait.
    pub fn close(&self, effect: &'static str) {
        self.gate.0.lock().unwrap().closed.push(effect);
    }

    pub fn open(&self) {
        self.gate.0.lock().unwrap().closed.clear();
        self.gate.1.notify_all();
    }

    /// The number of effects that wait.
    pub fn waiting(&self) -> usize {
        self.gate.0.lock().unwrap().waiting
    }

    /// Returns when this many effects wait.
    pub async fn reached(&self, waiting: usize) {
        while self.waiting() < waiting {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    }

    pub fn set_missing(&self, missing: &[&str]) {
        self.gate.0.lock().unwrap().missing = missing.iter().map(|m| m.to_string()).collect();
    }

    /// From now on, every effect panics.
    pub fn panic_from_now(&self) {
        self.gate.0.lock().unwrap().panics = true;
    }
}

/// A node on a host whose effects can be blocked.
pub async fn gated() -> (GatedHost, Node) {
    let machine = MemoryHost::new();
    let host = GatedHost::new(machine.clone());
    let node = Node::on(machine, Arc::new(host.clone()), Alpha::default(), |_| {}).await;
    (host, node)
}

impl Node {
    /// CreateVolume of `v`. The caller disconnects while the work waits at the gate, so the call is
    /// canceled on the server as well.
    pub async fn abandon_create(&self, host: &GatedHost) {
        host.close("allocate");
        let mut caller = self.controller.clone();
        let call = tokio::spawn(async move { caller.create_volume(create("v")).await });
        host.reached(1).await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
    }
}

impl Host for GatedHost {
    fn perform(&self, effect: &Effect<'_>) -> Result<Done> {
        let (state, opened) = &*self.gate;
        let mut state = state.lock().unwrap();
        let panics = state.panics;
        state.waiting += 1;
        while state.closed.contains(&effect.name()) {
            state = opened.wait(state).unwrap();
        }
        state.waiting -= 1;
        drop(state);
        assert!(!panics, "a defect for a test");
        self.inner.perform(effect)
    }

    fn missing(&self) -> Vec<String> {
        self.gate.0.lock().unwrap().missing.clone()
    }

    fn pin_dir(&self, path: &Path) -> Result<(PathBuf, Kept)> {
        self.inner.pin_dir(path)
    }
    fn shares_blocks(&self, path: &Path) -> Result<bool> {
        self.inner.shares_blocks(path)
    }
    fn open_foreign(&self, top: &Path, below: &Path) -> Result<Box<dyn ForeignFile>> {
        self.inner.open_foreign(top, below)
    }
    fn try_lock_file(&self, path: &Path) -> Result<Option<Kept>> {
        self.inner.try_lock_file(path)
    }
    fn read_file(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        self.inner.read_file(path)
    }
    fn list_dir(&self, path: &Path) -> Result<Option<Vec<String>>> {
        self.inner.list_dir(path)
    }
    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        self.inner.stat(path)
    }
    fn space(&self, path: &Path) -> Result<Space> {
        self.inner.space(path)
    }
    fn mount_of(&self, folder: &Path) -> Result<FolderMount> {
        self.inner.mount_of(folder)
    }
    fn backing_fs(&self, path: &Path) -> Result<BackingFs> {
        self.inner.backing_fs(path)
    }
    fn extents(&self, path: &Path, from: u64, limit: usize) -> Result<Vec<Extent>> {
        self.inner.extents(path, from, limit)
    }

    fn read_range(&self, path: &Path, offset: u64, length: u64) -> Result<Vec<Piece>> {
        self.inner.read_range(path, offset, length)
    }

    fn verify_copy(&self, copy: &Path, known: &Known) -> Result<bool> {
        self.inner.verify_copy(copy, known)
    }

    fn extent_count(&self, path: &Path) -> Result<u64> {
        self.inner.extent_count(path)
    }

    fn open_mount_root(
        &self,
        mount_point: &Path,
        device: &Device,
        fs: FsType,
    ) -> Result<MountRoot> {
        self.inner.open_mount_root(mount_point, device, fs)
    }

    fn mounts(&self) -> Result<Vec<Mount>> {
        self.inner.mounts()
    }
    fn loop_devices(&self, may_be: &dyn Fn(&Path) -> bool) -> Result<Vec<LoopDevice>> {
        self.inner.loop_devices(may_be)
    }
    fn hold_loop(&self, number: u32, backing: FileId) -> Result<Option<LoopHold>> {
        self.inner.hold_loop(number, backing)
    }
    fn is_claimed(&self, device: &Device) -> Result<bool> {
        self.inner.is_claimed(device)
    }
    fn device_bytes(&self, device: &Device) -> Result<u64> {
        self.inner.device_bytes(device)
    }
    fn signature(&self, device: &Device) -> Result<Signature> {
        self.inner.signature(device)
    }
    fn is_unclean(&self, device: &Device, fs: FsType) -> Result<bool> {
        self.inner.is_unclean(device, fs)
    }
    fn can_grow_unmounted(&self, device: &Device) -> Result<bool> {
        self.inner.can_grow_unmounted(device)
    }
    fn should_grow(&self, device: &Device, mount_point: &Path, fs: FsType) -> Result<bool> {
        self.inner.should_grow(device, mount_point, fs)
    }
    fn check_path(&self, path: &Path) -> std::result::Result<(), String> {
        self.inner.check_path(path)
    }
    fn mount_table_path(&self, path: &Path) -> Result<PathBuf> {
        self.inner.mount_table_path(path)
    }
    fn stat_csi_path(&self, path: &Path) -> Result<Option<FileStat>> {
        self.inner.stat_csi_path(path)
    }
    fn space_csi_path(&self, path: &Path) -> Result<Space> {
        self.inner.space_csi_path(path)
    }
    fn boot_id(&self) -> Result<Uuid> {
        self.inner.boot_id()
    }
    fn random_uuid(&self) -> Uuid {
        self.inner.random_uuid()
    }
    fn now_nanos(&self) -> u64 {
        self.inner.now_nanos()
    }

    fn pause(&self, time: Duration) {
        self.inner.pause(time);
    }

    fn now(&self) -> u64 {
        self.inner.now()
    }
}
