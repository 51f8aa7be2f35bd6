//! The simplest model of the driver: a map of volumes, and the answer and the change of each call.

use std::collections::{BTreeMap, BTreeSet};

use slackwater::model::{FsType, Wipe};
use slackwater::record::FormattedAs;
use tonic::Code;

use crate::simulation::{SIZE, Step, VolumeConfig};
use crate::state_machine::cuts::{Cut, Group, SnapshotView, Source};

/// The visible state of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeView {
    /// The parameters at its creation.
    pub config: VolumeConfig,
    pub source: Option<Source>,
    pub size: u64,
    pub wipe: Wipe,
    /// The file system with which it was completely formatted.
    pub formatted: Option<FormattedAs>,
    /// The file system of a mkfs that was cut off.
    pub begun: Option<FormattedAs>,
    pub staged: bool,
    /// Staged, with a file system that has the whole size.
    pub grown: bool,
    /// Targets, and whether they are read-only.
    pub published: BTreeMap<u8, bool>,
}

impl VolumeView {
    /// The view of a new volume.
    pub fn new(config: VolumeConfig, size: u64) -> VolumeView {
        VolumeView {
            config,
            source: None,
            size,
            wipe: config.wipe,
            formatted: None,
            begun: None,
            staged: false,
            grown: false,
            published: BTreeMap::new(),
        }
    }

    /// Whether both have the same record.
    fn is_recorded_as(&self, other: &VolumeView) -> bool {
        let recorded = |view: &VolumeView| (view.size, view.wipe, view.formatted, view.begun);
        recorded(self) == recorded(other)
    }
}

/// A volume.
#[derive(Clone, Debug)]
pub struct Volume {
    pub view: VolumeView,
    /// The capability with which it was last staged.
    capability: Option<VolumeConfig>,
    /// Its states before changes that no call has answered. A power loss may restore them.
    unanswered: Vec<VolumeView>,
    pub tokens: BTreeSet<u64>,
}

impl Volume {
    /// A volume that was never staged.
    pub fn new(view: VolumeView, tokens: BTreeSet<u64>) -> Volume {
        Volume {
            view,
            capability: None,
            unanswered: Vec::new(),
            tokens,
        }
    }
}

/// Everything that exists.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub volumes: BTreeMap<&'static str, Volume>,
    pub inline: BTreeMap<&'static str, Inline>,
    /// Volumes whose deletion was begun and never answered. A power loss may restore them.
    pub ghosts: BTreeMap<&'static str, Volume>,
    pub snapshots: BTreeMap<&'static str, Cut>,
    pub ghost_snapshots: BTreeMap<&'static str, Cut>,
    pub groups: BTreeMap<&'static str, Group>,
    pub ghost_groups: BTreeMap<&'static str, Group>,
    /// Names of what a call created that was cut off, and that no call was answered about since. A
    /// power loss may undo its creation.
    pub unanswered: BTreeSet<&'static str>,
    /// The file systems on the devices of raw volumes, as the machine sees them. The driver does
    /// not care what a user of a raw device writes there.
    pub shown: BTreeMap<&'static str, FsType>,
}

/// An inline volume.
#[derive(Clone, Debug, Default)]
pub struct Inline {
    pub mounted: bool,
    pub tokens: BTreeSet<u64>,
}

/// All visible state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    pub volumes: BTreeMap<&'static str, VolumeView>,
    /// Inline volumes, and whether they are mounted.
    pub inline: BTreeMap<&'static str, bool>,
    pub snapshots: BTreeMap<&'static str, SnapshotView>,
    /// Groups. Some of their members may be missing.
    pub groups: BTreeMap<&'static str, Group>,
}

impl Observation {
    /// Whether this is the expected state. A file system may be larger than expected: a growth that
    /// was cut off leaves a longer image, and the file system takes all of it.
    pub fn fits(&self, expected: &Observation) -> bool {
        let mut seen = self.clone();
        for (name, view) in &mut seen.volumes {
            let less = expected.volumes.get(name).is_some_and(|view| !view.grown);
            view.grown &= !less;
        }
        seen == *expected
    }

    /// Whether both are equal except for the marks that a volume was formatted: mkfs cannot be
    /// undone, and need not be.
    pub fn equals_except_formatting(&self, other: &Observation) -> bool {
        let unmarked = |seen: &Observation| {
            let mut seen = seen.clone();
            let views = seen.volumes.values_mut();
            views.for_each(|view| (view.formatted, view.begun, view.grown) = (None, None, false));
            seen
        };
        unmarked(self) == unmarked(other)
    }
}

fn formatted_as(config: VolumeConfig) -> FormattedAs {
    config.fs.map_or(FormattedAs::Raw, FormattedAs::from)
}

impl Model {
    pub fn seen(&self) -> Observation {
        let view = |(name, volume): (&&'static str, &Volume)| (*name, volume.view.clone());
        Observation {
            volumes: self.volumes.iter().map(view).collect(),
            inline: self.mounted(),
            snapshots: self
                .snapshots
                .iter()
                .map(|(name, cut)| (*name, cut.view.clone()))
                .collect(),
            groups: self.groups.clone(),
        }
    }

    fn mounted(&self) -> BTreeMap<&'static str, bool> {
        let mounted = |(name, inline): (&&'static str, &Inline)| (*name, inline.mounted);
        self.inline.iter().map(mounted).collect()
    }

    /// Performs a step, or returns the code with which it is refused.
    pub fn step(&mut self, step: &Step) -> Result<(), Code> {
        match step {
            Step::Create(name, config) => self.create(name, *config),
            Step::Delete(name) => match self.volumes.get(name) {
                Some(volume) if volume.view.staged || !volume.view.published.is_empty() => {
                    Err(Code::FailedPrecondition)
                }
                Some(_) | None => {
                    self.volumes.remove(name);
                    self.ghosts.remove(name);
                    Ok(())
                }
            },
            Step::Modify(name, wipe) => {
                self.volume(name)?.view.wipe = *wipe;
                Ok(())
            }
            Step::Expand(name, size) => {
                let view = &mut self.volume(name)?.view;
                view.grown &= *size <= view.size;
                view.size = view.size.max(*size);
                Ok(())
            }
            Step::NodeExpandVolume(name) => {
                let view = &mut self.volume(name)?.view;
                if !view.staged {
                    return Err(Code::NotFound);
                }
                view.grown = view.formatted != Some(FormattedAs::Raw);
                Ok(())
            }
            Step::StageAs(name, config) => self.stage(name, *config),
            Step::Unstage(name) => {
                if let Some(volume) = self.volumes.get_mut(name) {
                    volume.view.staged = false;
                    volume.view.grown = false;
                }
                Ok(())
            }
            Step::PublishAs(name, n, read_only, config) => {
                self.publish(name, *n, *read_only, *config)
            }
            Step::Unpublish(name, n) => {
                if let Some(volume) = self.volumes.get_mut(name) {
                    volume.view.published.remove(n);
                }
                Ok(())
            }
            Step::PublishInline(name, config) => match config.fs {
                None => Err(Code::InvalidArgument),
                Some(_) => {
                    self.inline.entry(name).or_default().mounted = true;
                    Ok(())
                }
            },
            Step::UnpublishInline(name) => {
                self.inline.remove(name);
                Ok(())
            }
            Step::Snapshot(name, volume, level) => self.snapshot(name, volume, *level),
            Step::DeleteSnapshot(name) => {
                self.snapshots.remove(name);
                self.ghost_snapshots.remove(name);
                Ok(())
            }
            Step::Restore(name, snapshot, config, size) => {
                self.create_from(name, Source::Snapshot(snapshot), *config, *size)
            }
            Step::Receive(name, config, size) => {
                self.create_from(name, Source::Remote, *config, *size)
            }
            Step::Clone(name, volume, config, size) => {
                self.create_from(name, Source::Volume(volume), *config, *size)
            }
            Step::Group(name, sources) => self.group(name, sources),
            Step::DeleteGroup(name) => {
                self.groups.remove(name);
                self.ghost_groups.remove(name);
                Ok(())
            }
            other => panic!("the model does not support {other:?}"),
        }
    }

    /// A call was answered, so the records of all objects that it names are durable.
    pub fn answered(&mut self, step: &Step) {
        for name in names_in(step) {
            self.unanswered.remove(name);
        }
        if let Step::Modify(name, _)
        | Step::Expand(name, _)
        | Step::StageAs(name, _)
        | Step::PublishAs(name, ..) = step
            && let Some(volume) = self.volumes.get_mut(name)
        {
            volume.unanswered.clear();
        }
    }

    fn volume(&mut self, name: &str) -> Result<&mut Volume, Code> {
        self.volumes.get_mut(name).ok_or(Code::NotFound)
    }

    fn create(&mut self, name: &'static str, config: VolumeConfig) -> Result<(), Code> {
        match self.volumes.get(name) {
            Some(Volume { view, .. }) if view.config == config && view.source.is_none() => Ok(()),
            Some(_) => Err(Code::AlreadyExists),
            None => {
                let volume = Volume::new(VolumeView::new(config, SIZE), BTreeSet::new());
                self.volumes.insert(name, volume);
                self.ghosts.remove(name);
                Ok(())
            }
        }
    }

    fn stage(&mut self, name: &str, config: VolumeConfig) -> Result<(), Code> {
        let shown = self.shown.get(name).copied();
        let volume = self.volume(name)?;
        let view = &mut volume.view;
        let is_block = |formatted| formatted == FormattedAs::Raw;
        // A raw volume that is not in use may be mounted with the file system that is on it.
        let is_found = view.formatted == Some(FormattedAs::Raw)
            && config.fs.is_some()
            && config.fs == shown
            && !view.staged
            && view.published.is_empty();
        if is_found {
            view.formatted = config.fs.map(FormattedAs::from);
        }
        if view
            .formatted
            .is_some_and(|formatted| is_block(formatted) != config.fs.is_none())
        {
            return Err(Code::FailedPrecondition);
        }
        if view.staged {
            let same = volume
                .capability
                .is_some_and(|before| before.fs == config.fs);
            return if same {
                Ok(())
            } else {
                Err(Code::AlreadyExists)
            };
        }
        if view
            .formatted
            .is_some_and(|formatted| formatted != formatted_as(config))
        {
            return Err(Code::FailedPrecondition);
        }
        (view.formatted, view.begun) = (Some(formatted_as(config)), None);
        view.staged = true;
        view.grown = config.fs.is_some();
        volume.capability = Some(config);
        Ok(())
    }

    fn publish(
        &mut self,
        name: &str,
        n: u8,
        read_only: bool,
        config: VolumeConfig,
    ) -> Result<(), Code> {
        let view = &mut self.volume(name)?.view;
        let as_staged = view.formatted == Some(FormattedAs::Raw);
        if !view.staged || as_staged != config.fs.is_none() {
            return Err(Code::FailedPrecondition);
        }
        match view.published.get(&n) {
            Some(before) if *before == read_only => return Ok(()),
            Some(_) => return Err(Code::AlreadyExists),
            None => {}
        }
        // All targets of a block volume share one device, so they are either all read-only or all
        // writable.
        if config.fs.is_none() && view.published.values().any(|before| *before != read_only) {
            return Err(Code::FailedPrecondition);
        }
        view.published.insert(n, read_only);
        Ok(())
    }

    /// Mounts and inline volumes end with a reboot. Of inline volumes that cannot be read then,
    /// only the mount ends.
    pub fn reboot(&mut self, is_hidden: impl Fn(&'static str) -> bool) {
        self.inline.retain(|name, _| is_hidden(name));
        self.inline
            .values_mut()
            .for_each(|inline| inline.mounted = false);
        for volume in self.volumes.values_mut() {
            volume.view.staged = false;
            volume.view.grown = false;
            volume.view.published.clear();
        }
    }

    /// Records whether the file system of a volume has the whole size.
    pub fn set_grown(&mut self, name: &str, grown: bool) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.view.grown = grown;
        }
    }

    /// The names of all volumes, snapshots and groups.
    fn names(&self) -> BTreeSet<&'static str> {
        let cuts = self.snapshots.keys().chain(self.groups.keys());
        self.volumes.keys().chain(cuts).copied().collect()
    }

    /// Takes over the actual result of a call that was cut off on the way from `self` to `after`:
    /// each part of it must be in its old or its new state.
    pub fn adopt(&mut self, after: &Model, now: &Observation) -> Result<(), String> {
        let known = self.volumes.keys().chain(after.volumes.keys());
        let names: BTreeSet<&'static str> = known.chain(now.volumes.keys()).copied().collect();
        let before = self.names();
        for name in names {
            let then = after.volumes.get(name);
            match now.volumes.get(name) {
                Some(view) => self.adopt_volume(name, then, view)?,
                None => match (self.volumes.remove(name), then) {
                    (Some(_), Some(_)) if !self.unanswered.remove(name) => {
                        return Err(format!("{name} is missing"));
                    }
                    (Some(_), Some(_)) => {}
                    (Some(ghost), None) => drop(self.ghosts.insert(name, ghost)),
                    (None, _) => {}
                },
            }
        }
        self.adopt_snapshots(after, now)?;
        self.adopt_groups(after, now)?;
        let created: Vec<_> = self.names().difference(&before).copied().collect();
        self.unanswered.extend(created);
        let (before, then) = (self.mounted(), after.mounted());
        for name in before.keys().chain(then.keys()).chain(now.inline.keys()) {
            let is = now.inline.get(name);
            // A volume that was only being deleted or created may exist without its mount.
            let half = is == Some(&false) && before.get(name) != then.get(name);
            // A volume of an earlier boot is deleted by the next start that can read it.
            let ended = is.is_none() && before.get(name) == Some(&false);
            if is != before.get(name) && is != then.get(name) && !half && !ended {
                return Err(format!("inline {name}: {is:?}"));
            }
            match is {
                Some(mounted) => self.inline.entry(name).or_default().mounted = *mounted,
                None => drop(self.inline.remove(name)),
            }
        }
        Ok(())
    }

    fn adopt_volume(
        &mut self,
        name: &'static str,
        then: Option<&Volume>,
        view: &VolumeView,
    ) -> Result<(), String> {
        let before = self.volumes.get(name).or(self.ghosts.get(name));
        let known: Vec<&Volume> = before.into_iter().chain(then).collect();
        let mut views: Vec<&VolumeView> = known.iter().map(|volume| &volume.view).collect();
        views.extend(before.iter().flat_map(|volume| &volume.unanswered));
        if !is_between(&views, view) {
            return Err(format!("{name} is {view:?}, between {views:?}"));
        }
        let capability = match (before, then) {
            (_, Some(then)) if view.staged => then.capability,
            (Some(before), _) => before.capability,
            (None, then) => then.and_then(|then| then.capability),
        };
        // Of those that were created in the same way, it may be any.
        let same = |volume: &&&Volume| {
            volume.view.config == view.config && volume.view.source == view.source
        };
        let tokens = known
            .iter()
            .filter(same)
            .map(|volume| volume.tokens.clone());
        let tokens = tokens.reduce(|one, other| &one & &other);
        let mut unanswered = before.map_or(Vec::new(), |before| before.unanswered.clone());
        unanswered.extend(before.map(|before| before.view.clone()));
        unanswered.retain(|before| !before.is_recorded_as(view));
        let adopted = Volume {
            view: view.clone(),
            capability,
            unanswered,
            tokens: tokens.unwrap_or_default(),
        };
        self.volumes.insert(name, adopted);
        Ok(())
    }
}

/// The volumes, snapshots and groups that a call names, except one that it deletes.
fn names_in(step: &Step) -> Vec<&'static str> {
    match step {
        Step::Create(name, _)
        | Step::Receive(name, ..)
        | Step::ImportFile(name, _)
        | Step::Modify(name, _)
        | Step::Expand(name, _)
        | Step::StageAs(name, _)
        | Step::PublishAs(name, ..) => vec![name],
        Step::Snapshot(name, of, _) | Step::Restore(name, of, ..) | Step::Clone(name, of, ..) => {
            vec![name, of]
        }
        Step::Group(name, sources) => sources.iter().chain([name]).copied().collect(),
        _ => Vec::new(),
    }
}

/// Whether each part equals that of one of these views.
fn is_between(views: &[&VolumeView], now: &VolumeView) -> bool {
    let any = |same: &dyn Fn(&VolumeView) -> bool| views.iter().any(|view| same(view));
    let targets = || views.iter().flat_map(|view| view.published.keys());
    any(&|view| view.config == now.config && view.source == now.source)
        && any(&|view| view.size == now.size)
        && any(&|view| view.wipe == now.wipe)
        && any(&|view| view.formatted == now.formatted)
        && any(&|view| view.staged == now.staged)
        && any(&|view| now.grown || !view.grown)
        && targets()
            .chain(now.published.keys())
            .all(|n| any(&|view| view.published.get(n) == now.published.get(n)))
}
