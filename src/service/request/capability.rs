//! `VolumeCapability`: malformed, unsupported and supported ones.

use crate::csi::VolumeCapability;
use crate::csi::volume_capability::access_mode::Mode;
use crate::csi::volume_capability::{AccessType as Given, MountVolume};
use crate::error::{Error, Result};
use crate::model::{AccessMode, AccessType, Capability, FsType, mount_option};

const SINGLE_NODE: &str = "a volume is on the disk of one node; give SINGLE_NODE_MULTI_WRITER \
    (ReadWriteOnce) or SINGLE_NODE_SINGLE_WRITER (ReadWriteOncePod)";

/// Parses a required `volume_capability`.
pub fn required(capability: Option<&VolumeCapability>) -> Result<Capability> {
    const FIELD: &str = "volume_capability";
    let capability = capability.ok_or_else(|| Error::invalid(FIELD, "is missing"))?;
    parse(FIELD, capability)
}

/// Parses an optional `volume_capability`.
pub fn optional(capability: Option<&VolumeCapability>) -> Result<Option<Capability>> {
    capability.map(|given| required(Some(given))).transpose()
}

/// Parses `volume_capabilities`: at least one, all with one access type.
pub fn for_one_volume(capabilities: &[VolumeCapability]) -> Result<Vec<Capability>> {
    not_empty(capabilities)?;
    let parsed = all(capabilities)?;
    let types = || parsed.iter().map(|capability| &capability.access_type);
    if types().any(|t| *t == AccessType::Block) && types().any(|t| *t != AccessType::Block) {
        return Err(Error::invalid(
            LIST,
            "both block and mount are requested; give one access type per volume",
        ));
    }
    let mut fs_types = types().filter_map(fs_type_of);
    if let Some(first) = fs_types.next()
        && let Some(other) = fs_types.find(|fs| *fs != first)
    {
        return Err(Error::invalid(
            LIST,
            format!("both {first} and {other} are requested; give one fs_type per volume"),
        ));
    }
    Ok(parsed)
}

/// A volume for readers on many nodes must be a copy of a source, and no other capability may
/// permit writing to it.
pub fn readers_of_copies(field: &str, parsed: &[Capability], is_copy: bool) -> Result<()> {
    let is_for_readers = |it: &Capability| it.access_mode == AccessMode::MultiNodeReaderOnly;
    let readers = parsed.iter().filter(|it| is_for_readers(it)).count();
    if readers == 0 || is_copy && readers == parsed.len() {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        "MULTI_NODE_READER_ONLY (ReadOnlyMany) is only supported as the only mode of a volume with a volume_content_source; give a source, or SINGLE_NODE_MULTI_WRITER (ReadWriteOnce)",
    ))
}

/// Parses `volume_capabilities`; fails if any of them is invalid.
pub fn all(capabilities: &[VolumeCapability]) -> Result<Vec<Capability>> {
    let each = capabilities.iter().enumerate();
    each.map(|(i, given)| parse(&entry(i), given)).collect()
}

/// Parses each capability: a malformed one is an error, an unsupported one gives a message.
pub fn parse_each(capabilities: &[VolumeCapability]) -> Result<Vec<Result<Capability, String>>> {
    not_empty(capabilities)?;
    let each = capabilities.iter().enumerate();
    each.map(|(i, given)| {
        let field = entry(i);
        check_form(&field, given)?;
        Ok(parse(&field, given).map_err(|error| error.to_string()))
    })
    .collect()
}

const LIST: &str = "volume_capabilities";

fn entry(index: usize) -> String {
    format!("{LIST}[{index}]")
}

fn not_empty(capabilities: &[VolumeCapability]) -> Result<()> {
    if capabilities.is_empty() {
        return Err(Error::invalid(LIST, "is missing; give at least one"));
    }
    Ok(())
}

fn fs_type_of(access_type: &AccessType) -> Option<FsType> {
    match access_type {
        AccessType::Block => None,
        AccessType::Mount { fs_type, .. } => *fs_type,
    }
}

/// Checks the requirements of CSI for every capability.
fn check_form<'a>(field: &str, capability: &'a VolumeCapability) -> Result<(&'a Given, i32)> {
    let access_type = capability.access_type.as_ref().ok_or_else(|| {
        let field = format!("{field}.access_type");
        Error::invalid(field, "is missing; give block or mount")
    })?;
    let mode = capability.access_mode.as_ref().map_or(0, |mode| mode.mode);
    if mode == Mode::Unknown as i32 {
        let field = format!("{field}.access_mode");
        let problem = "is missing; give one of the SINGLE_NODE modes";
        return Err(Error::invalid(field, problem));
    }
    Ok((access_type, mode))
}

/// Parses one capability; `field` is its name in the request.
pub fn parse(field: &str, capability: &VolumeCapability) -> Result<Capability> {
    let (access_type, mode) = check_form(field, capability)?;
    Ok(Capability {
        access_type: match access_type {
            Given::Block(_) => AccessType::Block,
            Given::Mount(mount) => parse_mount(&format!("{field}.mount"), mount)?,
        },
        access_mode: parse_mode(&format!("{field}.access_mode"), mode)?,
    })
}

fn parse_mount(field: &str, mount: &MountVolume) -> Result<AccessType> {
    let fs_type = match mount.fs_type.as_str() {
        "" => None,
        text => Some(text.parse::<FsType>().map_err(|()| {
            let known = FsType::ALL.map(FsType::name).join(", ");
            Error::invalid(
                format!("{field}.fs_type"),
                format!("{text:?} is not supported; give {known}, or nothing for ext4"),
            )
        })?),
    };
    mount_option::check(&format!("{field}.mount_flags"), &mount.mount_flags)?;
    if !mount.volume_mount_group.is_empty() {
        return Err(Error::invalid(
            format!("{field}.volume_mount_group"),
            format!(
                "{:?} cannot be applied: this node does not have the capability VOLUME_MOUNT_GROUP; omit it, and the kubelet changes the group",
                mount.volume_mount_group
            ),
        ));
    }
    Ok(AccessType::Mount {
        fs_type,
        mount_flags: mount.mount_flags.clone(),
    })
}

fn parse_mode(field: &str, mode: i32) -> Result<AccessMode> {
    let multi = |name: &str| {
        Err(Error::invalid(
            field,
            format!("{name} is not supported: {SINGLE_NODE}"),
        ))
    };
    match Mode::try_from(mode) {
        Ok(Mode::SingleNodeWriter) => Ok(AccessMode::SingleNodeWriter),
        Ok(Mode::SingleNodeReaderOnly) => Ok(AccessMode::SingleNodeReaderOnly),
        Ok(Mode::SingleNodeSingleWriter) => Ok(AccessMode::SingleNodeSingleWriter),
        Ok(Mode::SingleNodeMultiWriter) => Ok(AccessMode::SingleNodeMultiWriter),
        Ok(Mode::MultiNodeReaderOnly) => Ok(AccessMode::MultiNodeReaderOnly),
        Ok(Mode::MultiNodeSingleWriter) => multi("MULTI_NODE_SINGLE_WRITER"),
        Ok(Mode::MultiNodeMultiWriter) => multi("MULTI_NODE_MULTI_WRITER"),
        Ok(Mode::Unknown) | Err(_) => Err(Error::invalid(
            field,
            format!("{mode} is not a mode of CSI 1.13; give one of the SINGLE_NODE modes"),
        )),
    }
}
