-- Slurm's burst_buffer/lua with BAFS volumes: `#BAFS` lines of a batch script become volumes.
-- Decides nothing about placement beyond the node with the most free space.
--
-- slurmctld runs slurm_bb_pools, slurm_bb_job_process and slurm_bb_paths itself, with its locks
-- held. These three read local files only. The others run in slurmscriptd and may take long.
--
-- Settings are lines of NAME=VALUE in the file that BAFS_BURST_BUFFER_CONF names, by default
-- /etc/bafs/burst_buffer.conf: program, identity, catalog, state, mounts, pool_bytes.

local DEFAULT_CONF = "/etc/bafs/burst_buffer.conf"

-- Slurm counts the pool in these.
local GRANULARITY = 1048576

-- A volume of a job outlives a stage-out that home cannot take for a week.
local JOB_HOURS = 24 * 7
local PERSISTENT_HOURS = 24 * 365

-- ------------------------------------------------------------------------------------ settings

local function read_settings()
  local path = os.getenv("BAFS_BURST_BUFFER_CONF") or DEFAULT_CONF
  local file = io.open(path, "r")
  if not file then
    return nil, "BAFS: cannot read " .. path .. "; the administrator has to create it"
  end
  local settings = {
    program = "bafs", state = "/var/lib/bafs/burst_buffer", mounts = "/run/bafs", pool_bytes = "0",
  }
  for line in file:lines() do
    local name, value = line:match("^%s*([%w_]+)%s*=%s*(.-)%s*$")
    if name then settings[name] = value end
  end
  file:close()
  return settings
end

-- One word of a shell.
local function quote(text)
  return "'" .. tostring(text):gsub("'", "'\\''") .. "'"
end

-- Success, and all that a command printed.
local function run(command)
  local pipe = io.popen(command .. " 2>&1; echo \"exit $?\"", "r")
  if not pipe then return false, "cannot start a shell" end
  local text = pipe:read("*a") or ""
  pipe:close()
  local said, code = text:match("^(.-)exit (%d+)%s*$")
  return code == "0", (said or text):gsub("%s+$", "")
end

local function bafs(settings, words)
  local command = { quote(settings.program) }
  for _, word in ipairs(words) do table.insert(command, quote(word)) end
  table.insert(command, "--identity " .. quote(settings.identity))
  table.insert(command, "--catalog " .. quote(settings.catalog))
  return run(table.concat(command, " "))
end

-- ---------------------------------------------------------------------------------- directives

local UNITS = {
  [""] = 1, b = 1,
  kb = 1e3, mb = 1e6, gb = 1e9, tb = 1e12, pb = 1e15,
  k = 2 ^ 10, m = 2 ^ 20, g = 2 ^ 30, t = 2 ^ 40, p = 2 ^ 50,
  kib = 2 ^ 10, mib = 2 ^ 20, gib = 2 ^ 30, tib = 2 ^ 40, pib = 2 ^ 50,
}

-- Bytes of `3.5TB` (decimal), `3.5TiB` or `3.5T` (binary, as Slurm reads single letters).
local function parse_size(text)
  local number, unit = tostring(text):match("^(%d+%.?%d*)%s*(%a*)$")
  local factor = unit and UNITS[unit:lower()]
  if not number or not factor then
    return nil, "'" .. tostring(text) .. "' is no size; write it like 3.5TB, 3500GB or 64GiB"
  end
  local bytes = math.ceil(tonumber(number) * factor)
  if bytes <= 0 then return nil, "a size must be above zero" end
  return bytes
end

local function parse_words(rest)
  local words = {}
  for name, value in rest:gmatch("([%w_]+)=(%S+)") do words[name] = value end
  return words
end

local function check_name(name)
  return name and #name <= 32 and name:match("^[%a_][%w_]*$") ~= nil
end

local function check_url(url)
  return url and url:match("^%a[%w+.-]*://%S+$") ~= nil
end

local HANDLERS = {}

local function add_volume(plan, words, kind)
  if not check_name(words.name) then
    return kind .. " needs name=NAME of letters, digits and '_'"
  end
  if plan.by_name[words.name] then return "two volumes have the name " .. words.name end
  local bytes, why = parse_size(words.size)
  if not bytes then return kind .. " name=" .. words.name .. ": " .. why end
  local volume = { name = words.name, bytes = bytes, kind = kind }
  plan.by_name[volume.name] = volume
  table.insert(plan.volumes, volume)
end

function HANDLERS.jobdw(plan, words) return add_volume(plan, words, "jobdw") end
function HANDLERS.persistentdw(plan, words) return add_volume(plan, words, "persistentdw") end

function HANDLERS.copy_in(plan, words)
  if not check_url(words.source) then return "copy_in needs source=URL" end
  table.insert(plan.copy_in, words)
end

function HANDLERS.copy_out(plan, words)
  if not check_url(words.target) then return "copy_out needs target=URL" end
  if not words.path or words.path:find("..", 1, true) then
    return "copy_out needs path=FILE inside the volume"
  end
  table.insert(plan.copy_out, words)
end

-- What a script asks for, or why it cannot be understood.
local function parse_script(path)
  local file = io.open(path, "r")
  if not file then return nil, "BAFS: cannot read the job script" end
  local plan = { volumes = {}, by_name = {}, copy_in = {}, copy_out = {} }
  local number, why = 0, nil
  for line in file:lines() do
    number = number + 1
    local kind, rest = line:match("^#BAFS%s+(%S+)%s*(.*)$")
    -- `#BAFS pool=… capacity=…` is for Slurm, where BAFS is its directive.
    local is_ours = kind and not kind:match("^pool=") and not kind:match("^capacity=")
    if is_ours and not why then
      local handler = HANDLERS[kind]
      why = "unknown directive " .. kind
      if handler then why = handler(plan, parse_words(rest)) end
      if why then why = "line " .. number .. ": " .. why end
    end
  end
  file:close()
  for _, copies in ipairs({ plan.copy_in, plan.copy_out }) do
    for _, copy in ipairs(copies) do
      if not plan.by_name[copy.volume or ""] then
        why = why or ("copy of an unknown volume " .. tostring(copy.volume))
      end
    end
  end
  for _, copy in ipairs(plan.copy_in) do
    local volume = plan.by_name[copy.volume or ""]
    if volume and volume.source then why = why or "a volume has one copy_in" end
    if volume then volume.source = copy.source end
  end
  if why then return nil, "BAFS: " .. why end
  return plan
end

-- Bytes that `capacity=` of Slurm's own directive says, as Slurm understands it; an error for a decimal fraction,
-- of which Slurm takes the part before the point only.
local function parse_capacity(path)
  for line in io.lines(path) do
    local text = line:match("^#BB_LUA.-capacity=(%S+)")
      or line:match("^#BAFS.-%f[%w]capacity=(%S+)")
    if text and text:find(".", 1, true) then
      return nil, "BAFS: Slurm does not understand capacity=" .. text
        .. ": write it without a point, such as 3500GB"
    end
    if text then return parse_size(text) end
  end
  return 0
end

-- --------------------------------------------------------------------------------------- state

local function state_directory(settings, job_id)
  return settings.state .. "/" .. job_id
end

-- Name of the volume in BAFS. Persistent volumes belong to a user, whom setup writes down.
local function volume_label(settings, job_id, volume)
  if volume.kind == "jobdw" then return "slurm-" .. job_id .. "-" .. volume.name end
  local file = io.open(state_directory(settings, job_id) .. "/uid", "r")
  local uid = file and file:read("*l") or "0"
  if file then file:close() end
  return "slurm-persistent-" .. uid .. "-" .. volume.name
end

local function write_file(path, text)
  local file, why = io.open(path .. ".draft", "w")
  if not file then return false, why end
  file:write(text)
  file:close()
  return os.rename(path .. ".draft", path)
end

local function has_file(path)
  local file = io.open(path, "r")
  if file then file:close() end
  return file ~= nil
end

local function fail(text)
  slurm.log_error("%s", text)
  return slurm.ERROR, text
end

-- The node with the most free space for a volume.
local function choose_node(settings, bytes)
  local fine, servers = bafs(settings, { "--json", "servers" })
  if not fine then return nil, servers end
  local best, best_free = nil, -1
  for server in servers:gmatch('%b{}') do
    local name = server:match('"kind":"node","name":"(.-)"')
    local free = tonumber(server:match('"free_bytes":(%d+)') or "")
    if name and free and free >= bytes and free > best_free then
      best, best_free = name, free
    end
  end
  if not best then return nil, "no BAFS node has " .. bytes .. " bytes free" end
  return best
end

local function volume_state(settings, label)
  local fine, shown = bafs(settings, { "--json", "volume", "show", label })
  if not fine then return nil, shown end
  return shown:match('"state":"(%a+)"'), shown
end

local function delete_volumes(settings, job_id, plan)
  local failed = nil
  for _, volume in ipairs(plan.volumes) do
    if volume.kind == "jobdw" then
      local label = volume_label(settings, job_id, volume)
      if volume_state(settings, label) then
        local fine, said = bafs(settings, { "volume", "delete", label })
        if not fine then failed = failed or said end
      end
    end
  end
  return failed
end

-- ----------------------------------------------------- functions that slurmctld runs with locks

function slurm_bb_pools()
  local settings, why = read_settings()
  if not settings then return fail(why) end
  local quantity = math.floor((tonumber(settings.pool_bytes) or 0) / GRANULARITY) * GRANULARITY
  return slurm.SUCCESS, string.format(
    '{"pools":[{"id":"bafs","quantity":%.0f,"granularity":%d}]}', quantity, GRANULARITY)
end

function slurm_bb_job_process(job_script)
  local plan, why = parse_script(job_script)
  if not plan then return slurm.ERROR, why end
  local capacity
  capacity, why = parse_capacity(job_script)
  if not capacity then return slurm.ERROR, why end
  local needed = 0
  for _, volume in ipairs(plan.volumes) do
    if volume.kind == "jobdw" then needed = needed + volume.bytes end
  end
  if capacity > 0 and capacity < needed then
    return slurm.ERROR, string.format(
      "BAFS: the volumes need %.0f bytes, but capacity= has %.0f", needed, capacity)
  end
  return slurm.SUCCESS
end

function slurm_bb_paths(job_id, job_script, path_file)
  local settings, why = read_settings()
  if not settings then return fail(why) end
  local plan
  plan, why = parse_script(job_script)
  if not plan then return fail(why) end
  local file
  file, why = io.open(path_file, "w")
  if not file then return fail(why) end
  for _, volume in ipairs(plan.volumes) do
    file:write("BAFS_", volume.name, "=", settings.mounts, "/", job_id, "/", volume.name, "\n")
  end
  file:close()
  return slurm.SUCCESS
end

-- ----------------------------------------------------------------- functions of slurmscriptd

local function open_job(job_script)
  local settings, why = read_settings()
  if not settings then return nil, nil, why end
  local plan
  plan, why = parse_script(job_script)
  return settings, plan, why
end

function slurm_bb_setup(job_id, uid, gid, pool, bb_size, job_script)
  local settings, plan, why = open_job(job_script)
  if not plan then return fail(why) end
  local place = state_directory(settings, job_id)
  run("mkdir -p " .. quote(place) .. " && chmod 700 " .. quote(place))
  write_file(place .. "/uid", uid .. "\n")
  for _, volume in ipairs(plan.volumes) do
    local label = volume_label(settings, job_id, volume)
    if not volume_state(settings, label) then
      local node
      node, why = choose_node(settings, volume.bytes)
      if not node then return fail("BAFS: " .. why) end
      local hours = volume.kind == "jobdw" and JOB_HOURS or PERSISTENT_HOURS
      local words = {
        "volume", "create", label, "--node", node, "--size", string.format("%.0f B", volume.bytes),
        "--lifetime-hours", hours,
      }
      if volume.source then
        table.insert(words, "--from")
        table.insert(words, volume.source)
      end
      local fine, said = bafs(settings, words)
      if not fine then return fail("BAFS: volume " .. volume.name .. ": " .. said) end
    end
  end
  return slurm.SUCCESS
end

function slurm_bb_data_in(job_id, job_script)
  local settings, plan, why = open_job(job_script)
  if not plan then return fail(why) end
  for _, volume in ipairs(plan.volumes) do
    local state, said
    repeat
      state, said = volume_state(settings, volume_label(settings, job_id, volume))
      if state == "creating" then run("sleep 1") end
    until state ~= "creating"
    if state ~= "ready" then
      return fail("BAFS: stage-in of volume " .. volume.name .. ": " .. tostring(said))
    end
  end
  return slurm.SUCCESS
end

function slurm_bb_real_size(job_id)
  return slurm.SUCCESS
end

function slurm_bb_pre_run(job_id, job_script)
  return slurm.SUCCESS
end

function slurm_bb_post_run(job_id, job_script)
  return slurm.SUCCESS
end

-- A shell that sends every result home, however often home refuses it, and then deletes the
-- volumes if Slurm has torn the job down meanwhile. It has a session of its own: what Slurm does
-- at StageOutTimeout does not reach it.
local function write_stage_out(settings, job_id, plan)
  local place = state_directory(settings, job_id)
  local client = " --identity " .. quote(settings.identity) .. " --catalog "
    .. quote(settings.catalog)
  local program = quote(settings.program)
  local lines = { "cd " .. quote(place), "echo $$ > stage_out.pid" }
  for index, copy in ipairs(plan.copy_out) do
    local label = volume_label(settings, job_id, plan.by_name[copy.volume])
    local send = table.concat({
      program, "volume extract", quote(label), quote(copy.path), quote(copy.target), client,
    }, " ")
    table.insert(lines, "until [ -e sent." .. index .. " ] || " .. send
      .. " > said." .. index .. " 2>&1; do sleep 5; done; touch sent." .. index)
  end
  table.insert(lines, "touch stage_out.done")
  table.insert(lines, "[ -e torn_down ] || exit 0")
  for _, volume in ipairs(plan.volumes) do
    if volume.kind == "jobdw" then
      table.insert(lines, program .. " volume delete " .. quote(volume_label(settings, job_id, volume)) .. client)
    end
  end
  table.insert(lines, "cd / && rm -r " .. quote(place))
  return write_file(place .. "/stage_out.sh", table.concat(lines, "\n") .. "\n")
end

-- Starts it unless it runs already: slurmctld repeats a stage-out after its restart.
local function start_stage_out(settings, job_id)
  local place = state_directory(settings, job_id)
  local command = "cd " .. quote(place) .. " && { kill -0 $(cat stage_out.pid 2>/dev/null) "
    .. "2>/dev/null || setsid /bin/sh stage_out.sh </dev/null >/dev/null 2>&1 & }"
  return run(command)
end

function slurm_bb_data_out(job_id, job_script)
  local settings, plan, why = open_job(job_script)
  if not plan then return fail(why) end
  if #plan.copy_out == 0 then return slurm.SUCCESS end
  local place = state_directory(settings, job_id)
  if not write_stage_out(settings, job_id, plan) then
    return fail("BAFS: cannot write to " .. place)
  end
  start_stage_out(settings, job_id)
  -- The directory is removed when the volumes are.
  run("cd " .. quote(place) .. " && until [ -e stage_out.done ] || ! [ -e stage_out.sh ]; do "
    .. "sleep 0.2; done")
  return slurm.SUCCESS
end

function slurm_bb_job_teardown(job_id, job_script, hurry)
  local settings, plan, why = open_job(job_script)
  if not plan then return fail(why) end
  local place = state_directory(settings, job_id)
  local is_sending = has_file(place .. "/stage_out.sh") and not has_file(place .. "/stage_out.done")
  if is_sending then
    -- The results are not at home. Whoever sends them deletes the volumes afterwards.
    write_file(place .. "/torn_down", "")
    start_stage_out(settings, job_id)
    return slurm.SUCCESS
  end
  why = delete_volumes(settings, job_id, plan)
  if why then return fail("BAFS: " .. why) end
  run("rm -rf " .. quote(place))
  return slurm.SUCCESS
end

function slurm_bb_get_status(uid, gid, ...)
  local settings, why = read_settings()
  if not settings then return fail(why) end
  local _, listed = run("cd " .. quote(settings.state) .. " && for job in *; do "
    .. "[ -d \"$job\" ] || continue; sent=$(ls \"$job\" | grep -c '^sent\\.'); "
    .. "out=$(ls \"$job\" | grep -c '^said\\.'); said=$(cat \"$job\"/said.* 2>/dev/null | tail -n 1); "
    .. "echo \"job $job: $sent of $out results sent $said\"; done")
  return slurm.SUCCESS, listed
end
