-- Bookings of kv-router for HAProxy 2.6 or newer: the tokens of a prompt, a booking whose answer is
-- headers, the first piece of the response, and its end.

local ROUTER = os.getenv("KV_ROUTER_URL") or "http://127.0.0.1:8092"
-- An engine, which tokenizes texts as all of them do.
local TOKENIZER = os.getenv("KV_TOKENIZER_URL") or "http://127.0.0.1:8000"

local PLACED = {["/v1/completions"] = true, ["/v1/chat/completions"] = true}
local JSON = {["content-type"] = {"application/json"}}

local function post(url, body)
    return core.httpclient():post{url = url, headers = JSON, body = body}
end

local function refuse(txn, status, body)
    local reply = txn:reply{status = status}
    reply:add_header("content-type", "application/json")
    reply:set_body(body)
    txn:done(reply)
end

-- A quote within a text has a backslash before it, so that no text of a prompt matches.
local function tokens_of(body)
    local tokens = body:match('"prompt"%s*:%s*(%[[%d%s,]+%])')
    if tokens then return tokens end
    local answer = post(TOKENIZER .. "/tokenize", body)
    return answer.status == 200 and answer.body:match('"tokens"%s*:%s*(%[[%d%s,]*%])')
end

core.register_action("place", {"http-req"}, function(txn)
    if txn.f:method() ~= "POST" or not PLACED[txn.f:path()] then
        return refuse(txn, 404, '{"error": "no such route"}')
    end
    local tokens = tokens_of(txn.f:req_body())
    if not tokens then
        return refuse(txn, 400, '{"error": "no engine tokenizes this prompt"}')
    end
    local booking = '{"token_ids": ' .. tokens .. '}'
    local answer = post(ROUTER .. "/select_and_reserve?answer=headers", booking)
    if answer.status ~= 200 then
        return refuse(txn, answer.status > 0 and answer.status or 503, answer.body or "")
    end
    local function header(name) return answer.headers[name][0] end
    local host, port = header("x-gateway-destination-endpoint"):match("^%[?(.-)%]?:(%d+)$")
    txn:set_var("txn.kv_host", host)
    txn:set_var("txn.kv_port", port)
    txn:set_var("txn.kv_rank", header("x-data-parallel-rank"))
    txn:set_var("txn.kv_worker", header("x-worker-id"))
    txn:set_var("txn.kv_id", header("x-request-id"))
end)

-- Filters must not wait, so a task of its own reports.
local function report(method, path)
    core.register_task(function()
        local client = core.httpclient()
        client[method](client, {url = ROUTER .. "/reservations/" .. path})
    end)
end

local Booking = {id = "kv-router", flags = filter.FLT_CFG_FL_HTX}
Booking.__index = Booking

function Booking:new()
    return setmetatable({is_prefilled = false}, Booking)
end

function Booking:start_analyze(txn, channel)
    if channel:is_resp() then filter.register_data_filter(self, channel) end
end

function Booking:http_payload(txn, message)
    local id = txn:get_var("txn.kv_id")
    if id and not self.is_prefilled then
        self.is_prefilled = true
        report("post", id .. "/prefill_complete")
    end
end

-- The end of the response, or of the connection to the client.
function Booking:end_analyze(txn, channel)
    local id = txn:get_var("txn.kv_id")
    if id and channel:is_resp() then report("delete", id) end
end

core.register_filter("kv_router", Booking, function(class) return class end)
