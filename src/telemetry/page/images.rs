//! What the images of pools occupy, and the claims that grow pools most.

use std::cmp::Reverse;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::list::{Listed, Search, limited};
use super::problems::is_stale;
use super::text::{When, permille, shown, size};
use super::world::{Grown, Growth, Images, Pool, World};

/// Agents count once an hour, and know what grows an hour after their start.
const COUNTED_WITHIN: SignedDuration = SignedDuration::from_hours(3);

/// What the images of a pool occupy, each block counted once.
#[derive(Clone, Debug, Serialize)]
pub struct ImagesRow {
    /// Blocks that one volume has, and no other image.
    pub own_bytes: u64,
    /// Blocks that a volume has, and another image, too.
    pub shared_bytes: u64,
    /// Blocks that only snapshots and hidden bases have.
    pub snapshot_bytes: u64,
    /// An upper bound of the blocks of images that may share some and were not compared.
    pub undivided_bytes: u64,
    /// The rest of what is used: records, and files of other programs.
    pub other_bytes: u64,
    /// The number of volumes that were not measured yet.
    pub unmeasured_volumes: u64,
    /// When the oldest of these numbers was measured.
    pub measured: When,
    /// It was not measured for hours, or its pool is not reported any more.
    pub is_stale: bool,
    #[serde(skip)]
    pub(super) own: String,
    #[serde(skip)]
    pub(super) shared: String,
    #[serde(skip)]
    pub(super) snapshots: String,
    #[serde(skip)]
    pub(super) undivided: String,
    #[serde(skip)]
    pub(super) other: String,
}

/// A part of the bar of a pool. Its length is 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The name of its color.
    pub(super) name: &'static str,
    pub(super) x: u64,
    pub(super) width: u64,
}

/// A volume that has grown.
#[derive(Clone, Debug, Serialize)]
pub struct GrowingRow {
    /// "namespace/name"; empty if it is not known.
    pub claim: String,
    /// The ID of the volume.
    pub volume: String,
    /// The UUID of its pool.
    pub pool: String,
    pub pool_name: String,
    pub node: String,
    /// With its snapshots.
    pub grown_bytes: u64,
    pub since: When,
    /// When that was measured.
    pub measured: When,
    /// It was not measured for hours, or its pool is not reported any more.
    pub is_stale: bool,
    #[serde(skip)]
    pub(super) grown: String,
    /// In percent of the pool.
    #[serde(skip)]
    pub(super) share: String,
}

fn is_old(world: &World, pool: &Pool, measured: Timestamp) -> bool {
    let age = world.now.duration_since(measured);
    world.problem.is_some() || is_stale(pool, world.now) || age > COUNTED_WITHIN
}

/// What the images of a pool occupy, if that is known.
pub(super) fn images(world: &World, pool: &Pool) -> Option<ImagesRow> {
    let images = pool.images.as_ref()?;
    let used = pool.total_bytes.saturating_sub(pool.available_bytes);
    let parts = [
        images.own,
        images.shared,
        images.snapshots,
        images.undivided,
    ];
    let other = parts.into_iter().fold(used, u64::saturating_sub);
    Some(ImagesRow {
        own_bytes: images.own,
        shared_bytes: images.shared,
        snapshot_bytes: images.snapshots,
        undivided_bytes: images.undivided,
        other_bytes: other,
        unmeasured_volumes: images.unmeasured,
        measured: When::new(images.measured, world.now),
        is_stale: is_old(world, pool, images.measured),
        own: size(images.own),
        shared: size(images.shared),
        snapshots: size(images.snapshots),
        undivided: size(images.undivided),
        other: size(other),
    })
}

/// The used part of the bar of a pool, divided if that is known. It never ends after what is used: what
/// images occupy was measured earlier, and may have been freed.
pub(super) fn bar(pool: &Pool) -> Vec<Part> {
    let used = pool.total_bytes.saturating_sub(pool.available_bytes);
    let lengths = match &pool.images {
        None => vec![("other", used)],
        Some(Images {
            own,
            shared,
            snapshots,
            undivided,
            ..
        }) => vec![
            ("own", *own),
            ("shared", *shared),
            ("snapshots", *snapshots),
            ("undivided", *undivided),
            ("other", used),
        ],
    };
    let (mut end, mut x) = (0_u64, 0);
    let each = lengths.into_iter().map(|(name, bytes)| {
        end = end.saturating_add(bytes).min(used);
        let to = permille(end, pool.total_bytes);
        let part = Part {
            name,
            x,
            width: to - x,
        };
        x = to;
        part
    });
    each.filter(|part| part.width > 0).collect()
}

/// The volumes that have grown by the largest part of their pools, the first of them first.
pub(super) fn growing(world: &World, by: &Search) -> Listed<GrowingRow> {
    let pools = world.pools.iter().filter(|pool| !pool.is_gone);
    let known = pools.filter_map(|pool| Some((pool, pool.growth.as_ref()?)));
    let each = known.flat_map(|(pool, growth)| {
        let volumes = growth.volumes.iter();
        volumes.map(move |one| (pool, growth, one))
    });
    let found = each.filter(|(pool, _, one)| {
        let claim = one.claim.as_deref().unwrap_or_default();
        by.finds(&[claim, &one.volume, &pool.id, &pool.name, &pool.node])
    });
    let mut all: Vec<(&Pool, &Growth, &Grown)> = found.collect();
    all.sort_by_key(|(pool, _, one)| {
        let share = permille(one.bytes, pool.total_bytes);
        (Reverse(share), Reverse(one.bytes), one.volume.as_str())
    });
    limited(&all, |(pool, growth, one)| {
        let share = permille(one.bytes, pool.total_bytes);
        GrowingRow {
            claim: one.claim.as_deref().map(shown).unwrap_or_default(),
            volume: shown(&one.volume),
            pool: shown(&pool.id),
            pool_name: shown(&pool.name),
            node: shown(&pool.node),
            grown_bytes: one.bytes,
            since: When::new(one.since, world.now),
            measured: When::new(growth.measured, world.now),
            is_stale: is_old(world, pool, growth.measured),
            grown: size(one.bytes),
            share: format!("{}.{} %", share / 10, share % 10),
        }
    })
}

/// The number of pools of which it is not known what grows.
pub(super) fn not_known(world: &World) -> usize {
    let pools = world.pools.iter().filter(|pool| !pool.is_gone);
    pools.filter(|pool| pool.growth.is_none()).count()
}
