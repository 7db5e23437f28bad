"""Contract 2: what a folder written by llmc holds, and how it is read and checked.

Two kinds of folder exist, each with a manifest of frozen dataclasses: an *export* (``export.json``: the portable
decoder, weights by reference) and a *bundle* (``llmc.json``: graphs and weights for one target). Both are published
atomically by :mod:`llmc.publish`, so a folder with a manifest is complete.
"""

from llmc.bundle.adapters import ADAPTER_SCHEMA as ADAPTER_SCHEMA
from llmc.bundle.adapters import FACTOR_A as FACTOR_A
from llmc.bundle.adapters import FACTOR_B as FACTOR_B
from llmc.bundle.adapters import FACTORS_FILE as FACTORS_FILE
from llmc.bundle.adapters import AdapterManifest as AdapterManifest
from llmc.bundle.adapters import check_name as check_name
from llmc.bundle.adapters import list_adapters as list_adapters
from llmc.bundle.adapters import read_adapter_manifest as read_adapter_manifest
from llmc.bundle.adapters import write_adapter_manifest as write_adapter_manifest
from llmc.bundle.engine import DeviceMemory as DeviceMemory
from llmc.bundle.engine import EngineConfig as EngineConfig
from llmc.bundle.engine import Profile as Profile
from llmc.bundle.engine import version as version
from llmc.bundle.integrity import list_unlisted_files as list_unlisted_files
from llmc.bundle.integrity import sha256_file as sha256_file
from llmc.bundle.integrity import verify_files as verify_files
from llmc.bundle.integrity import verify_samples as verify_samples
from llmc.bundle.integrity import write_chunks as write_chunks
from llmc.bundle.manifest import ADAPTER_FILE as ADAPTER_FILE
from llmc.bundle.manifest import ADAPTERS_FOLDER as ADAPTERS_FOLDER
from llmc.bundle.manifest import BUNDLE_MANIFEST as BUNDLE_MANIFEST
from llmc.bundle.manifest import CACHE_BYTES as CACHE_BYTES
from llmc.bundle.manifest import CHUNKS_FILE as CHUNKS_FILE
from llmc.bundle.manifest import CONFIG_FILE as CONFIG_FILE
from llmc.bundle.manifest import DECODER_FILE as DECODER_FILE
from llmc.bundle.manifest import EXPORT_MANIFEST as EXPORT_MANIFEST
from llmc.bundle.manifest import GRAPH_CONTRACT_VERSION as GRAPH_CONTRACT_VERSION
from llmc.bundle.manifest import LARGEST_TOLERANCE as LARGEST_TOLERANCE
from llmc.bundle.manifest import MADE_FILE as MADE_FILE
from llmc.bundle.manifest import MOST_ADAPTERS as MOST_ADAPTERS
from llmc.bundle.manifest import MOST_RANK as MOST_RANK
from llmc.bundle.manifest import MOST_REPLAYED as MOST_REPLAYED
from llmc.bundle.manifest import PROMPTS_FILE as PROMPTS_FILE
from llmc.bundle.manifest import REPLAY as REPLAY
from llmc.bundle.manifest import SCHEMA_VERSION as SCHEMA_VERSION
from llmc.bundle.manifest import TOKENIZER_FILE as TOKENIZER_FILE
from llmc.bundle.manifest import TOKENIZER_FILES as TOKENIZER_FILES
from llmc.bundle.manifest import VISION_FILE as VISION_FILE
from llmc.bundle.manifest import WEIGHTS_FILE as WEIGHTS_FILE
from llmc.bundle.manifest import Budget as Budget
from llmc.bundle.manifest import Calibration as Calibration
from llmc.bundle.manifest import ExportManifest as ExportManifest
from llmc.bundle.manifest import FileEntry as FileEntry
from llmc.bundle.manifest import Generation as Generation
from llmc.bundle.manifest import GoldenPrompt as GoldenPrompt
from llmc.bundle.manifest import GoldenVector as GoldenVector
from llmc.bundle.manifest import Graph as Graph
from llmc.bundle.manifest import Invariance as Invariance
from llmc.bundle.manifest import Limits as Limits
from llmc.bundle.manifest import Manifest as Manifest
from llmc.bundle.manifest import MemoryPlan as MemoryPlan
from llmc.bundle.manifest import MergedAdapter as MergedAdapter
from llmc.bundle.manifest import PhaseQuality as PhaseQuality
from llmc.bundle.manifest import Quality as Quality
from llmc.bundle.manifest import Recipe as Recipe
from llmc.bundle.manifest import Similarity as Similarity
from llmc.bundle.manifest import Source as Source
from llmc.bundle.manifest import Target as Target
from llmc.bundle.manifest import write_manifest as write_manifest
from llmc.bundle.reading import build_command as build_command
from llmc.bundle.reading import explain_absent as explain_absent
from llmc.bundle.reading import find_unbuilt_kind as find_unbuilt_kind
from llmc.bundle.reading import publication as publication
from llmc.bundle.reading import read_bundle as read_bundle
from llmc.bundle.reading import read_export as read_export
from llmc.bundle.reading import read_same as read_same
from llmc.bundle.reading import read_undisturbed as read_undisturbed
from llmc.bundle.reading import refuse_bundle as refuse_bundle
from llmc.bundle.reading import refuse_other as refuse_other
from llmc.inventory import Geometry as Geometry
from llmc.strict import decode as decode
